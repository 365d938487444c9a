//! Every synthetic network compiles, and gives the same bits as a whole, in launches, and as the
//! original file.

use bytes::Bytes;
use rten::Value;
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

use super::runner::{Values, load_compiled, load_original, run, run_in_launches};
use crate::synth::{self, Encoder};
use crate::{ALIGNMENT, CompiledModel, MAX_LAUNCHES, compile};

fn floats(shape: &[usize]) -> Value {
    let len: usize = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    Tensor::from_data(shape, values).into()
}

fn tokens(shape: &[usize], vocabulary: i32) -> Value {
    let len: usize = shape.iter().product();
    let values: Vec<i32> = (0..len).map(|i| (i as i32 * 7919) % vocabulary).collect();
    Tensor::from_data(shape, values).into()
}

/// Returns the outputs as bits, so that equality means identical values.
fn bits(values: Values) -> Vec<(String, Vec<usize>, Vec<u32>)> {
    let each = values.into_iter().map(|(name, value)| {
        let tensor: Tensor<f32> = value.try_into().unwrap();
        assert!(tensor.iter().all(|x| x.is_finite()), "{name} is not finite");
        assert!(tensor.iter().any(|x| *x != 0.0), "{name} is all zero");
        (name, tensor.shape().to_vec(), tensor.iter().map(|x| x.to_bits()).collect())
    });
    each.collect()
}

fn check(onnx: Vec<u8>, input: &str, value: &Value, shape: &[usize]) -> CompiledModel {
    let onnx = Bytes::from(onnx);
    let compiled = compile(&onnx).unwrap();
    let given = [(input, value)];
    let outputs: Vec<String> = compiled.summary.outputs.iter().map(|output| output.name.clone()).collect();
    let original = bits(run(&load_original(&onnx), &given, &outputs));
    let model = load_compiled(&compiled, &onnx);
    assert_eq!(bits(run(&model, &given, &outputs)), original);
    assert_eq!(bits(run_in_launches(&model, &compiled, &given)), original);
    assert_eq!(original[0].1, shape);
    check_layout(&compiled);
    compiled
}

/// Checks that weights are ordered, aligned and disjoint, and that launches read all of them front to back.
fn check_layout(compiled: &CompiledModel) {
    let mut end = 0;
    for weight in &compiled.weights {
        assert_eq!(weight.offset, u64::next_multiple_of(end, ALIGNMENT));
        end = weight.offset + weight.bytes;
    }
    assert_eq!(compiled.summary.weights_bytes, end.next_multiple_of(ALIGNMENT));
    assert!((1..=MAX_LAUNCHES).contains(&compiled.launches.len()));
    let mut first_unread = 0;
    for launch in &compiled.launches {
        for read in &launch.reads {
            assert!(read.start <= u64::next_multiple_of(first_unread, ALIGNMENT), "a weight is skipped");
            first_unread = first_unread.max(read.end);
        }
        assert!(!launch.writes.is_empty());
    }
    assert_eq!(first_unread, end);
}

#[test]
fn mlp_is_a_single_launch() {
    let compiled = check(synth::mlp(), "x", &floats(&[3, 64]), &[3, 64]);
    assert_eq!(compiled.summary.parameters, 2 * (64 * 64 + 64));
    assert_eq!(compiled.launches.len(), 1);
}

#[test]
fn tiny_cnn_is_cut_into_launches() {
    let compiled = check(synth::tiny_cnn(), "x", &floats(&[2, 3, 32, 32]), &[2, 10]);
    assert!(compiled.launches.len() > 2, "{} launches", compiled.launches.len());
}

#[test]
fn transformer_block_is_cut_into_launches() {
    let compiled = check(synth::transformer_block(), "x", &floats(&[2, 9, 384]), &[2, 9, 384]);
    assert!(compiled.launches.len() > 1, "{} launches", compiled.launches.len());
}

#[test]
fn a_small_bert_is_cut_into_launches() {
    let compiled = check(synth::bert_like(Encoder::TINY), "input_ids", &tokens(&[2, 12], 3000), &[2, 128]);
    assert!(compiled.launches.len() > 1, "{} launches", compiled.launches.len());
}

#[test]
fn resnet50_like_is_cut_where_at_most_two_values_are_live() {
    let compiled = check(synth::resnet50_like(), "x", &floats(&[1, 3, 224, 224]), &[1, 1000]);
    let parameters = compiled.summary.parameters;
    assert!((25_500_000..25_700_000).contains(&parameters), "{parameters}");
    let (last, inner) = compiled.launches.split_last().unwrap();
    assert!(
        inner.iter().all(|launch| launch.writes.len() <= 2),
        "a cut has more values live than a block's two"
    );
    assert_eq!(last.writes, ["y"]);
}

#[test]
fn a_counter_adds_to_its_state() {
    let onnx = Bytes::from(synth::counter(4));
    let compiled = compile(&onnx).unwrap();
    let row = |values: [f32; 4]| Value::from(Tensor::from_data(&[1, 4], values.to_vec()));
    let x = row([1.0, 2.0, 3.0, 4.0]);
    let before = row([8.0, 0.0, -8.0, 2.0]);
    let given = [("x", &x), ("h_in", &before)];
    let outputs = ["y".to_owned(), "h_out".to_owned()];
    let expected = [("y", [10.0, 4.0, -2.0, 10.0]), ("h_out", [5.0_f32, 2.0, -1.0, 5.0])];
    let expected = expected.map(|(name, row)| (name.to_owned(), vec![1, 4], row.map(f32::to_bits).to_vec()));
    let model = load_compiled(&compiled, &onnx);
    assert_eq!(bits(run(&load_original(&onnx), &given, &outputs)), expected);
    assert_eq!(bits(run(&model, &given, &outputs)), expected);
    assert_eq!(bits(run_in_launches(&model, &compiled, &given)), expected);
    check_layout(&compiled);
}
