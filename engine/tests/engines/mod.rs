//! The engines that a test runs over, on an emulated GPU.

use std::num::NonZeroUsize;

use millrace_device::emulated::EmulatedGpu;
use millrace_engine::Engine;
use millrace_engine::ort::OrtEngine;
use millrace_engine::ort::library::LIBRARY_VARIABLE;
use millrace_engine::rten::RtenEngine;
use millrace_types::DataType;

/// An engine under test.
pub(crate) trait TestedEngine: Engine<Device = EmulatedGpu> + Sized {
    /// Whether a value of type INT64 reads a region in place.
    const INT64_IN_PLACE: bool;
    /// A datatype that the engine refuses.
    const REFUSED: DataType;

    /// Creates the engine, or returns `None` if its library is missing on this machine.
    fn create(gpu: EmulatedGpu) -> Option<Self>;
}

impl TestedEngine for RtenEngine {
    const INT64_IN_PLACE: bool = false;
    const REFUSED: DataType = DataType::Fp64;

    fn create(gpu: EmulatedGpu) -> Option<Self> {
        Some(Self::new(gpu, NonZeroUsize::MIN))
    }
}

impl TestedEngine for OrtEngine<EmulatedGpu> {
    const INT64_IN_PLACE: bool = true;
    const REFUSED: DataType = DataType::Bytes;

    fn create(gpu: EmulatedGpu) -> Option<Self> {
        if std::env::var_os(LIBRARY_VARIABLE).is_none() {
            eprintln!("skipped: {LIBRARY_VARIABLE} does not name a library of ONNX Runtime");
            return None;
        }
        Some(Self::new(gpu, NonZeroUsize::MIN).expect("the library can be opened"))
    }
}

/// Declares a test of each engine for each of these functions over a bench.
macro_rules! test_each_engine {
    ($($name:ident),* $(,)?) => {
        mod rten_engine {
            $(#[test] fn $name() { super::$name(super::bench::<millrace_engine::rten::RtenEngine>().unwrap()); })*
        }
        mod ort_engine {
            use millrace_device::emulated::EmulatedGpu;
            $(#[test] fn $name() {
                if let Some(bench) = super::bench::<millrace_engine::ort::OrtEngine<EmulatedGpu>>() {
                    super::$name(bench);
                }
            })*
        }
    };
}
pub(crate) use test_each_engine;
