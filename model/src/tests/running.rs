//! Compiled graphs give the same results in rten as their originals.

use rten::Value;
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

use super::runner::{Values, load_compiled, load_original, run, run_in_launches};
use super::*;
use crate::{MAX_CHAIN, compile};

fn floats(values: Values) -> Vec<Vec<f32>> {
    let tensors = values.into_iter().map(|(_, value)| Tensor::<f32>::try_from(value).unwrap());
    tensors.map(|tensor| tensor.iter().copied().collect()).collect()
}

/// Checks that a model gives the same results as a whole, in launches, and uncompiled. Returns the results.
#[track_caller]
fn check(model: &ModelProto, given: &[(&str, &Value)]) -> Vec<Vec<f32>> {
    let file = bytes(model);
    let compiled = compile(&file).unwrap();
    let outputs: Vec<String> = compiled.summary.outputs.iter().map(|output| output.name.clone()).collect();
    let original = floats(run(&load_original(&file), given, &outputs));
    let loaded = load_compiled(&compiled, &file);
    assert_eq!(floats(run(&loaded, given, &outputs)), original);
    assert_eq!(floats(run_in_launches(&loaded, &compiled, given)), original);
    original
}

fn x(values: [f32; 4]) -> Value {
    Tensor::from_data(&[1, 4], values.to_vec()).into()
}

#[test]
fn both_branches_of_a_choice_capture_and_read_weights() {
    let x = x([1.0, 2.0, 3.0, 4.0]);
    let given = |flag: i32| Value::from(Tensor::from_data(&[1], vec![flag]));
    let then = check(&choosing(), &[("x", &x), ("flag", &given(1))]);
    let otherwise = check(&choosing(), &[("x", &x), ("flag", &given(0))]);
    assert_ne!(then, otherwise);
}

#[test]
fn inputs_and_weights_that_are_outputs_are_returned() {
    let model = with(|graph| {
        graph.output.push(value("x", element::FLOAT, &["N", "4"]));
        graph.output.push(value("w", element::FLOAT, &["4", "4"]));
    });
    let given = x([1.0, 0.0, 0.0, 0.0]);
    let [y, x, w] = check(&model, &[("x", &given)]).try_into().unwrap();
    assert_eq!((y.len(), x.as_slice(), w.len()), (4, &[1.0, 0.0, 0.0, 0.0][..], 16));
}

#[test]
fn a_wrong_shape_claimed_for_an_output_does_not_fail_a_launch_that_reads_it() {
    let big = 1 << 10;
    let model = with(|graph| {
        graph.initializer = vec![weight("w", &[4, big]), weight("v", &[big, big]), weight("u", &[big, big])];
        let last = node("MatMul", &["b", "u"], &["y"]);
        graph.node = vec![node("MatMul", &["x", "w"], &["a"]), node("MatMul", &["a", "v"], &["b"]), last];
        graph.output.push(value("b", element::FLOAT, &["7", "7"]));
    });
    let compiled = compile(&bytes(&model)).unwrap();
    assert!(compiled.launches.iter().any(|launch| launch.args == ["b"]), "{:?}", compiled.launches);
    check(&model, &[("x", &x([1e-3; 4]))]);
}

#[test]
fn the_longest_accepted_chain_runs_on_half_of_a_thread_stack() {
    let name = |index: usize| format!("v{index}");
    let model = with(|graph| {
        graph.node = (0..MAX_CHAIN).map(|i| node("Relu", &[&name(i)], &[&name(i + 1)])).collect();
        graph.input[0].name = Some(name(0));
        graph.output[0].name = Some(name(MAX_CHAIN));
    });
    // The stack of a thread has 2 MiB by default in std.
    let thread = std::thread::Builder::new().stack_size(1 << 20);
    let y = thread.spawn(move || check(&model, &[("v0", &x([-1.0, 0.0, 1.0, 2.0]))]));
    assert_eq!(y.unwrap().join().unwrap(), [[0.0, 0.0, 1.0, 2.0]]);
}
