//! The detector finds the same objects as a plain loop over the pixels: as a whole, in launches, and
//! as the original file.

use bytes::Bytes;
use rten::Value;
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

use super::runner::{Values, load_compiled, load_original, run, run_in_launches};
use crate::compile;
use crate::synth::{FRAME_SIDE, PATCH_SIDE, PATCHES_ACROSS, THRESHOLD, detector};

type Colour = [f32; 3];

const RED: Colour = [0.9, 0.1, 0.2];
const BLUE: Colour = [0.1, 0.2, 0.8];
const GREEN: Colour = [0.1, 0.9, 0.1];
const GREY: Colour = [0.4; 3];

/// The outputs of the detector.
#[derive(Debug, PartialEq)]
struct Found {
    people: Vec<Vec<f32>>,
    vehicles: Vec<Vec<f32>>,
    any_people: Vec<i32>,
    any_vehicles: Vec<i32>,
}

/// Returns a frame with the listed patches in colour. Each pixel differs slightly from its neighbours.
fn frame(patches: &[(usize, Colour)]) -> Vec<f32> {
    let colour = |y: usize, x: usize| {
        let patch = y / PATCH_SIDE * PATCHES_ACROSS + x / PATCH_SIDE;
        patches.iter().find(|(at, _)| *at == patch).map_or(GREY, |(_, colour)| *colour)
    };
    let mut frame = Vec::with_capacity(3 * FRAME_SIDE * FRAME_SIDE);
    for channel in 0..3 {
        for at in 0..FRAME_SIDE * FRAME_SIDE {
            let texture = (at * 37 % 101) as f32 / 1010.0;
            frame.push(colour(at / FRAME_SIDE, at % FRAME_SIDE)[channel] + texture);
        }
    }
    frame
}

/// Computes the expected outputs with a plain loop.
fn reference(frame: &[f32]) -> Found {
    let mut people = Vec::new();
    let mut vehicles = Vec::new();
    for patch in 0..PATCHES_ACROSS * PATCHES_ACROSS {
        let top = patch / PATCHES_ACROSS * PATCH_SIDE;
        let left = patch % PATCHES_ACROSS * PATCH_SIDE;
        let mut crop = Vec::new();
        for channel in 0..3 {
            for y in top..top + PATCH_SIDE {
                let row = (channel * FRAME_SIDE + y) * FRAME_SIDE;
                crop.extend_from_slice(&frame[row + left..row + left + PATCH_SIDE]);
            }
        }
        let pixels = PATCH_SIDE * PATCH_SIDE;
        let mean = |channel: usize| {
            crop[channel * pixels..][..pixels].iter().map(|value| f64::from(*value)).sum::<f64>()
                / pixels as f64
        };
        let red = mean(0);
        let green = mean(1);
        let blue = mean(2);
        if red - (green + blue) / 2.0 > f64::from(THRESHOLD) {
            people.push(crop.clone());
        }
        if blue - (red + green) / 2.0 > f64::from(THRESHOLD) {
            vehicles.push(crop);
        }
    }
    let any_people = vec![i32::from(!people.is_empty())];
    let any_vehicles = vec![i32::from(!vehicles.is_empty())];
    Found { people, vehicles, any_people, any_vehicles }
}

fn found(mut values: Values) -> Found {
    let mut take = |wanted: &str| {
        let at = values.iter().position(|(name, _)| name == wanted).unwrap();
        values.remove(at).1
    };
    let crops = |value: Value| {
        let crops: Tensor<f32> = value.try_into().unwrap();
        assert_eq!(crops.shape()[1..], [3, PATCH_SIDE, PATCH_SIDE]);
        let all: Vec<f32> = crops.iter().copied().collect();
        all.chunks(3 * PATCH_SIDE * PATCH_SIDE).map(<[f32]>::to_vec).collect()
    };
    let any = |value: Value| {
        let any: Tensor<i32> = value.try_into().unwrap();
        assert_eq!(any.shape(), [1]);
        any.iter().copied().collect()
    };
    Found {
        people: crops(take("people")),
        vehicles: crops(take("vehicles")),
        any_people: any(take("any_people")),
        any_vehicles: any(take("any_vehicles")),
    }
}

fn check(patches: &[(usize, Colour)], people: usize, vehicles: usize) {
    let frame = frame(patches);
    let expected = reference(&frame);
    assert_eq!((expected.people.len(), expected.vehicles.len()), (people, vehicles));
    let value: Value = Tensor::from_data(&[1, 3, FRAME_SIDE, FRAME_SIDE], frame).into();
    let onnx = Bytes::from(detector());
    let compiled = compile(&onnx).unwrap();
    let outputs: Vec<String> = compiled.summary.outputs.iter().map(|output| output.name.clone()).collect();
    let given = [("frame", &value)];
    let model = load_compiled(&compiled, &onnx);
    assert_eq!(found(run(&load_original(&onnx), &given, &outputs)), expected);
    assert_eq!(found(run(&model, &given, &outputs)), expected);
    assert_eq!(found(run_in_launches(&model, &compiled, &given)), expected);
}

#[test]
fn an_empty_street_has_no_found_objects() {
    check(&[], 0, 0);
    check(&[(7, GREEN), (8, [1.0; 3]), (9, [0.0; 3])], 0, 0);
}

#[test]
fn a_single_object_is_found_at_any_position() {
    check(&[(0, RED)], 1, 0);
    check(&[(255, BLUE)], 0, 1);
    check(&[(15, BLUE), (240, RED)], 1, 1);
}

#[test]
fn many_objects_are_found_in_the_order_of_the_frame() {
    let crowd: Vec<_> = (0..60).map(|at| (at * 89 % 256, [RED, BLUE, GREEN][at % 3])).collect();
    check(&crowd, 20, 20);
    let full: Vec<_> = (0..256).map(|at| (at, RED)).collect();
    check(&full, 256, 0);
}
