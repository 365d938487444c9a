//! A model that rten loaded against a region, and its launches.
#![allow(unsafe_code, reason = "rten reads a region's addresses as static memory")]

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rten::{Model, ModelOptions, NodeId, RunOptions, ValueOrView};

use millrace_device::Error as DeviceError;
use millrace_device::emulated::{EmulatedRegion, PinnedBytes};

use super::value::{RtenValue, ValueElements};
use crate::api::{KernelSpec, LaunchArg, ModelCode};
use crate::error::Error;

/// A loaded model. The module stays loaded while its region is mapped and unmapped.
#[derive(Debug)]
pub struct Module {
    // Declared before the region so that it is dropped first: it refers to the region's addresses.
    model: Model,
    region: EmulatedRegion,
}

/// A launch: the part of the model's graph between some input and output values.
#[derive(Debug)]
pub struct Kernel {
    args: Vec<NodeId>,
    writes: Vec<NodeId>,
    reads: Vec<Range<u64>>,
}

impl Module {
    /// Loads a graph. Optimisation is off, because it would copy weights and rename values at which
    /// launches start.
    pub(super) fn load(region: &EmulatedRegion, code: ModelCode<'_>) -> Result<Self, Error> {
        let ModelCode { graph, weights_name, weights } = code;
        let load = |view: &'static [u8]| {
            let mut options = ModelOptions::with_all_ops();
            options.enable_optimization(false).external_data_static(weights_name, view);
            catch_unwind(AssertUnwindSafe(|| options.load(graph)))
        };
        // SAFETY: the view is stored in the model and nowhere else. The model is private to the
        // module, which drops the model before its own handle on the region. The model reads the view
        // only in `load` and in `launch`, which holds a pin.
        let loaded = unsafe { region.bind(weights, load)? };
        let model = loaded
            .map_err(|panic| Error::Code(panicked(&*panic)))?
            .map_err(|error| Error::Code(error.to_string()))?;
        Ok(Self { model, region: region.clone() })
    }

    pub(super) fn kernel(&self, spec: &KernelSpec) -> Result<Kernel, Error> {
        let nodes = |names: &[String]| names.iter().map(|name| self.node(name)).collect::<Result<_, _>>();
        for read in &spec.reads {
            if read.end > self.region.bytes() || read.start > read.end {
                let bytes = read.end.saturating_sub(read.start);
                let problem = "a launch reads past the end of the weights";
                return Err(DeviceError::BadExtent { offset: read.start, bytes, problem }.into());
            }
        }
        Ok(Kernel { args: nodes(&spec.args)?, writes: nodes(&spec.writes)?, reads: spec.reads.clone() })
    }

    fn node(&self, name: &str) -> Result<NodeId, Error> {
        self.model.find_node(name).ok_or_else(|| Error::UnknownValue(name.to_owned()))
    }

    pub(super) fn launch(
        &self,
        kernel: &Kernel,
        args: Vec<LaunchArg<'_, RtenValue>>,
        options: RunOptions,
    ) -> Result<Vec<RtenValue>, Error> {
        if args.len() != kernel.args.len() {
            let given = args.len();
            let due = kernel.args.len();
            return Err(Error::Launch(format!("got {given} values for a launch that takes {due}")));
        }
        let _pin = self.region.pin(&kernel.reads)?;
        // Keeps views of given values alive until the launch is over.
        let mut held = Vec::new();
        let inputs = args.into_iter().map(|arg| input(arg, &mut held));
        let inputs = kernel.args.iter().copied().zip(inputs).collect();
        // Operators panic on unexpected shapes, which is a failure of the request, not of the device.
        // No state that a panic leaves unfinished outlives the call.
        catch_unwind(AssertUnwindSafe(|| self.model.run(inputs, &kernel.writes, Some(options))))
            .map_err(|panic| Error::Launch(panicked(&*panic)))?
            .map(|values| values.into_iter().map(RtenValue::own).collect())
            .map_err(|error| Error::Launch(error.to_string()))
    }
}

fn input<'a>(arg: LaunchArg<'a, RtenValue>, held: &mut Vec<PinnedBytes>) -> ValueOrView<'a> {
    match arg {
        LaunchArg::Lend(value) => ValueOrView::View(value.as_view()),
        LaunchArg::Give(value) => match value.0 {
            ValueElements::Own(value) => ValueOrView::Value(value),
            ValueElements::InPlace(view, bytes) => {
                held.push(bytes);
                ValueOrView::View(view)
            }
        },
    }
}

fn panicked(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("an operator panicked: {}", text.unwrap_or("no message"))
}
