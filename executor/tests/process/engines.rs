//! Tests executors over ONNX Runtime beside executors over rten. Without the library the tests are skipped.

use std::os::unix::net::UnixStream;
use std::process::Stdio;

use millrace_device::DeviceMemory;
use millrace_executor::LIBRARY_VARIABLE;
use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::*;

use crate::support::{Executor, MEMORY, Model, executor_command, hello, send, x};

/// Returns an executor over ONNX Runtime, or `None` without the library.
fn start() -> Option<Executor> {
    if std::env::var_os(LIBRARY_VARIABLE).is_none() {
        eprintln!("skipped: {LIBRARY_VARIABLE} does not name a library of ONNX Runtime");
        return None;
    }
    Some(Executor::start_with(Hello { engine: Engine::Ort.into(), ..hello(MEMORY) }))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

#[test]
fn onnx_runtime_runs_models_during_their_copy_and_after_a_swap_with_the_results_of_rten() {
    let models = [
        (Model::new(synth::tiny_cnn()), x(&[2, 3, 32, 32])),
        (Model::new(synth::transformer_block()), x(&[1, 9, 384])),
    ];
    for (model, input) in models {
        let mut rten = Executor::with(&model, 1);
        rten.bring_in(&model, 1, 1);
        rten.run(1, 1, 1, input.clone());
        let expected = floats(&rten.ran(1).unwrap().bytes());
        let Some(mut executor) = start() else { return };
        executor.load(&model, 1);
        // The run begins before any weight is copied, and again after the model has left the GPU.
        for generation in [1, 2] {
            executor.map(&model, 1, generation, 0);
            executor.run(generation, 1, generation, input.clone());
            for launch in &model.compiled.launches {
                let batch = executor.grant(1, generation, &launch.reads);
                executor.copied(batch).unwrap();
            }
            let found = floats(&executor.ran(generation).unwrap().bytes());
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= 1e-3 * (1.0 + expected.abs()), "{found} and {expected}");
            }
            assert_eq!(found.len(), expected.len());
            executor.unmap(1, generation);
        }
    }
}

#[test]
fn an_executor_without_its_library_or_its_engine_ends_with_a_message() {
    for (engine, says) in [
        (Engine::Ort, "ONNX Runtime: there is no file /no/such/library.so"),
        (Engine::Unspecified, "Hello names no engine"),
    ] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let memory = DeviceMemory::create("gpu", MEMORY).unwrap().share().unwrap();
        send(&ours, Command::Hello(Hello { engine: engine.into(), ..hello(MEMORY) }), vec![memory]);
        let mut command = executor_command();
        command.env(LIBRARY_VARIABLE, "/no/such/library.so").stdin(std::os::fd::OwnedFd::from(theirs));
        let output = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(says), "{said}");
    }
}
