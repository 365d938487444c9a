//! The committed example model fulfils the claims of its README.

use image::imageops::FilterType;
use millrace_types::manifest::ModelSource;
use rten::Value;
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

use super::runner::{load_compiled, run_in_launches};
use super::*;
use crate::{CompiledModel, compile};

const ONNX: &[u8] = include_bytes!("../../../examples/digits/digits.onnx");
const HELD_OUT: &str = include_str!("../../../examples/digits/held_out.csv");
const MANIFEST: &str = include_str!("../../../examples/digits/function.yaml");
/// Correct answers for the 100 held-out rows, according to the README.
const CLAIMED: usize = 98;

/// Returns the model's labels of images with 8×8 pixels.
fn classify(images: &[Vec<u8>]) -> Vec<i32> {
    let file = Bytes::from_static(ONNX);
    let compiled: CompiledModel = compile(&file).unwrap();
    let pixels: Vec<f32> = images.iter().flatten().map(|&pixel| f32::from(pixel) / 255.0).collect();
    let given: Value = Tensor::from_data(&[images.len(), 1, 8, 8], pixels).into();
    let model = load_compiled(&compiled, &file);
    let outputs = run_in_launches(&model, &compiled, &[("image", &given)]);
    let (_, labels) = outputs.into_iter().find(|(name, _)| name == "label").unwrap();
    Tensor::<i32>::try_from(labels).unwrap().iter().copied().collect()
}

#[test]
fn held_out_digits_are_recognized_with_the_claimed_accuracy() {
    let rows = HELD_OUT.lines().skip(1).map(|line| {
        let mut numbers = line.split(',').map(|number| number.parse::<u8>().unwrap());
        (i32::from(numbers.next().unwrap()), numbers.collect::<Vec<u8>>())
    });
    let (labels, images): (Vec<i32>, Vec<Vec<u8>>) = rows.unzip();
    assert_eq!(labels.len(), 100);
    let right = classify(&images).iter().zip(&labels).filter(|(found, label)| found == label).count();
    assert!(right >= CLAIMED, "{right} of 100");
}

#[test]
fn each_test_image_is_recognized_with_every_shrinking_filter() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/digits/images");
    for filter in [FilterType::Nearest, FilterType::Triangle, FilterType::CatmullRom, FilterType::Lanczos3] {
        let images: Vec<Vec<u8>> = (0..10)
            .map(|digit| {
                let image = image::open(folder.join(format!("digit-{digit}.png"))).unwrap();
                image.resize_exact(8, 8, filter).to_luma8().into_raw()
            })
            .collect();
        assert_eq!(classify(&images), (0..10).collect::<Vec<i32>>(), "{filter:?}");
    }
}

#[test]
fn manifest_of_the_example_is_valid() {
    let manifest = millrace_types::manifest::parse(MANIFEST).unwrap().remove(0).function().unwrap();
    let file = ModelSource::File { path: "digits.onnx".into(), declared: None };
    assert_eq!((manifest.spec.key.to_string().as_str(), manifest.model), ("default/digits", file));
}
