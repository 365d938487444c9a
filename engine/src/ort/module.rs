//! A model that is loaded against a region, and its launches: a session of ONNX Runtime for each launch.
//!
//! The weights are inputs of a session's graph, which are bound once to their addresses in the region. They
//! are not given as initializers (`AddInitializer`), although ONNX Runtime then reads them in place too. Its
//! optimizer takes the values of initializers from the model, folds them into new weights, and would have to
//! read them when the session is made. An input is never read before a run and never copied.
#![allow(unsafe_code, reason = "`ort` would copy a tensor over foreign memory before it binds the tensor")]

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use millrace_device::{Error as DeviceError, Event as _, RangeSet, Stream as _};
use millrace_model::extract::{ExtractError, ExtractableGraph, ValueType};
use ort::AsPointer as _;
use ort::memory::MemoryInfo;
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{IoBinding, RunOptions, Session};
use ort::sys;
use ort::value::{DynTensor, DynTensorValueType};

use super::context::SessionContext;
use super::memory::{OrtDevice, Provider};
use super::value::{self, OrtValue};
use crate::api::{KernelSpec, LaunchArg, ModelCode};
use crate::error::Error;

/// A loaded model. The module stays loaded while its region is mapped and unmapped.
#[derive(Debug)]
pub struct OrtModule<D: OrtDevice> {
    graph: ExtractableGraph,
    /// Types of the values that nodes compute, inferred when the first launch begins at such a value.
    types: OnceLock<HashMap<String, ValueType>>,
    region: D::Region,
}

/// A launch: the part of the model's graph between some input and output values.
#[derive(Debug)]
pub struct OrtKernel<D: OrtDevice> {
    /// Locked for a whole run, because concurrent runs of one session fail according to `ort`, although ONNX
    /// Runtime promises that they work.
    session: Mutex<BoundSession>,
    /// Number of the input values.
    args: usize,
    /// Bytes of the region that the launch reads: those that it declares, and those of its weights.
    reads: Vec<Range<u64>>,
    // Declared after the session, which is dropped first: the region's addresses and the engine's stream must
    // outlive the session.
    region: D::Region,
    _context: Arc<SessionContext<D>>,
}

/// A session with bound weights.
struct BoundSession {
    binding: IoBinding,
    session: Session,
    options: RunOptions,
    args: Vec<BoundArg>,
    outputs: Vec<String>,
    /// Memory in which the outputs are allocated.
    memory: MemoryInfo<'static>,
    /// Whether an argument is copied to the host when it is bound, because a node on the CPU reads the value.
    copies_args: bool,
    /// Tensors over the region, to which the binding refers.
    _weights: Vec<DynTensor>,
}

impl fmt::Debug for BoundSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundSession").field("outputs", &self.outputs).finish_non_exhaustive()
    }
}

/// An input value of a session.
#[derive(Debug)]
struct BoundArg {
    name: CString,
    /// A tensor without elements that is bound between runs, so that the binding keeps no value alive.
    placeholder: DynTensor,
}

impl<D: OrtDevice> OrtModule<D> {
    pub(super) fn load(region: &D::Region, code: ModelCode<'_>) -> Result<Self, Error> {
        let ModelCode { graph, weights_name, weights } = code;
        let bytes = D::region_bytes(region);
        if weights.bytes().get() != bytes {
            let problem = "not the size of the host copy";
            return Err(DeviceError::BadExtent { offset: 0, bytes, problem }.into());
        }
        let graph = ExtractableGraph::read(graph, weights_name, bytes)
            .map_err(|error| Error::Code(error.to_string()))?;
        Ok(Self { graph, types: OnceLock::new(), region: region.clone() })
    }

    pub(super) fn kernel(
        &self,
        context: &Arc<SessionContext<D>>,
        spec: &KernelSpec,
    ) -> Result<OrtKernel<D>, Error> {
        let region_bytes = D::region_bytes(&self.region);
        for read in &spec.reads {
            if read.end > region_bytes || read.start > read.end {
                let bytes = read.end.saturating_sub(read.start);
                let problem = "a launch reads past the end of the weights";
                return Err(DeviceError::BadExtent { offset: read.start, bytes, problem }.into());
            }
        }
        let none = HashMap::new();
        let types = match spec.args.iter().any(|arg| self.graph.is_computed(arg)) {
            true => self.types(context)?,
            false => &none,
        };
        let part = self.graph.extract(&spec.args, &spec.writes, types).map_err(|error| match error {
            ExtractError::UnknownValue(name) => Error::UnknownValue(name),
            other => Error::Code(other.to_string()),
        })?;
        let mut reads = RangeSet::default();
        spec.reads.iter().for_each(|read| reads.insert(read.clone()));
        let mut weights = Vec::with_capacity(part.weights.len());
        for weight in part.weights {
            reads.insert(weight.offset..weight.offset + weight.bytes);
            let address = D::address(&self.region).after(weight.offset);
            let element = value::element(weight.datatype)?;
            // SAFETY: the extractor checked that the bytes are within the region. Only a launch reads the
            // tensor, and a launch pins these bytes. The kernel keeps the region alive.
            let tensor =
                unsafe { value::over(&context.allocator(), address, weight.bytes, element, &weight.shape)? };
            weights.push((weight.name, tensor));
        }
        let session = BoundSession::new(context, &part.onnx, &spec.args, part.outputs, weights)?;
        Ok(OrtKernel {
            session: Mutex::new(session),
            args: spec.args.len(),
            reads: reads.iter().collect(),
            region: self.region.clone(),
            _context: Arc::clone(context),
        })
    }

    /// Returns the types that ONNX Runtime infers for the values that nodes compute.
    fn types(&self, context: &SessionContext<D>) -> Result<&HashMap<String, ValueType>, Error> {
        if let Some(types) = self.types.get() {
            return Ok(types);
        }
        let session = context
            .cpu_session(GraphOptimizationLevel::Disable)?
            .commit_from_memory(&self.graph.typed_by_engine())
            .map_err(|error| Error::Code(error.to_string()))?;
        let known = session.outputs().iter().filter_map(|output| {
            let ort::value::ValueType::Tensor { ty, shape, .. } = output.dtype() else { return None };
            // ONNX Runtime's numbers of element types are those of ONNX.
            let element = sys::ONNXTensorElementDataType::from(*ty) as i32;
            let shape = shape.iter().map(|&dim| u64::try_from(dim).ok()).collect();
            Some((output.name().to_owned(), ValueType { element, shape }))
        });
        let types = known.collect();
        Ok(self.types.get_or_init(|| types))
    }
}

impl<D: OrtDevice> OrtKernel<D> {
    /// Runs the launch. The caller has prepared the stream.
    pub(super) fn launch(
        &self,
        stream: &mut D::Stream,
        args: Vec<LaunchArg<'_, OrtValue<D>>>,
    ) -> Result<Vec<OrtValue<D>>, Error> {
        if args.len() != self.args {
            let given = args.len();
            let due = self.args;
            return Err(Error::Launch(format!("got {given} values for a launch that takes {due}")));
        }
        let _pin = D::pin(stream, &self.region, &self.reads)?;
        let tensors: Vec<_> = args.iter().map(|arg| value_of(arg).tensor()).collect();
        let outputs = {
            let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
            if session.copies_args {
                // ONNX Runtime copies such an argument outside the stream.
                stream.record()?.wait()?;
            }
            session.run(&tensors).map_err(launch_error)?
        };
        let tensors = outputs.into_iter().map(|output| {
            let tensor = output.downcast::<DynTensorValueType>();
            tensor.map(OrtValue::own).map_err(|error| Error::Launch(error.to_string()))
        });
        tensors.collect()
    }
}

fn value_of<'a, V>(arg: &'a LaunchArg<'_, V>) -> &'a V {
    match arg {
        LaunchArg::Lend(value) => value,
        LaunchArg::Give(value) => value,
    }
}

/// Distinguishes a launch for which no memory is left from a launch that fails on its inputs.
fn launch_error(error: ort::Error) -> Error {
    let text = error.to_string();
    if text.contains("Failed to allocate memory") || text.contains("bad_alloc") {
        return Error::Device(DeviceError::OutOfMemory(text));
    }
    Error::Launch(text)
}

impl BoundSession {
    fn new<D: OrtDevice>(
        context: &SessionContext<D>,
        onnx: &[u8],
        args: &[String],
        outputs: Vec<String>,
        weights: Vec<(String, DynTensor)>,
    ) -> Result<Self, Error> {
        let code = |error: ort::Error| Error::Code(error.to_string());
        // Extended optimizations fuse nodes, but not across the end of a launch: a run as one launch and a run
        // launch by launch would then differ in the last bits. They gain nothing where weights are inputs.
        let mut builder = context.session(GraphOptimizationLevel::Level1)?;
        let session = builder.commit_from_memory(onnx).map_err(code)?;
        let elsewhere = inputs_elsewhere(&session, context.provider).map_err(code)?;
        // The copy of a weight would be made now, while no weight is on the device.
        if let Some((weight, _)) = weights.iter().find(|(name, _)| elsewhere.contains(&name.as_str())) {
            return Err(Error::Code(format!("the device lacks an operator that reads weight {weight:?}")));
        }
        let copies_args = args.iter().any(|arg| elsewhere.contains(&arg.as_str()));
        let mut binding = session.create_binding().map_err(code)?;
        let mut kept = Vec::with_capacity(weights.len());
        for (name, weight) in weights {
            bind(&mut binding, &c_string(&name)?, &weight).map_err(code)?;
            kept.push(weight);
        }
        let placeholders = args.iter().map(|name| {
            let input = session.inputs().iter().find(|input| input.name() == name);
            let element = input.and_then(|input| input.dtype().tensor_type());
            let element = element.ok_or_else(|| Error::Code(format!("input {name:?} is not a tensor")))?;
            Ok(BoundArg {
                name: c_string(name)?,
                placeholder: value::allocate(&context.allocator(), element, &[0])?,
            })
        });
        let args = placeholders.collect::<Result<_, Error>>()?;
        let mut options = RunOptions::new().map_err(code)?;
        // The device orders the work by its streams, so a run need not wait for the provider.
        options.disable_device_sync().map_err(code)?;
        let memory = context.output_memory()?;
        Ok(Self { binding, session, options, args, outputs, memory, copies_args, _weights: kept })
    }

    /// Runs the session, and returns its outputs in order.
    fn run(&mut self, values: &[&DynTensor]) -> Result<Vec<ort::value::DynValue>, ort::Error> {
        let result = self.run_bound(values);
        // Releases the values, also after an error. An output that stayed bound would be written again.
        self.binding.clear_outputs();
        for arg in &self.args {
            bind(&mut self.binding, &arg.name, &arg.placeholder)?;
        }
        result
    }

    fn run_bound(&mut self, values: &[&DynTensor]) -> Result<Vec<ort::value::DynValue>, ort::Error> {
        for (arg, value) in self.args.iter().zip(values) {
            bind(&mut self.binding, &arg.name, value)?;
        }
        for output in &self.outputs {
            self.binding.bind_output_to_device(output.as_str(), &self.memory)?;
        }
        let mut made = self.session.run_binding_with_options(&self.binding, &self.options)?;
        let missing = || ort::Error::new("a run made no value for an output");
        self.outputs.iter().map(|output| made.remove(output).ok_or_else(missing)).collect()
    }
}

/// Returns the inputs that a session takes from other memory than that of its provider's device.
fn inputs_elsewhere(session: &Session, provider: Provider) -> Result<Vec<&str>, ort::Error> {
    let expected = match provider {
        Provider::Cpu => sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_CPU,
        Provider::Cuda { .. } => sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_GPU,
    };
    let inputs = session.inputs();
    let mut infos = vec![std::ptr::null(); inputs.len()];
    // SAFETY: the session is alive, and the list has an entry for each of its inputs.
    let status =
        unsafe { (ort::api().SessionGetMemoryInfoForInputs)(session.ptr(), infos.as_mut_ptr(), infos.len()) };
    // SAFETY: the status comes from the call above and is used once.
    unsafe { ort::Error::result_from_status(status)? };
    let named = inputs.iter().zip(infos).filter(|(_, info)| !info.is_null());
    let elsewhere = named.filter(|(_, info)| {
        let mut found = expected;
        // SAFETY: the info belongs to the session, which is alive.
        unsafe { (ort::api().MemoryInfoGetDeviceType)(*info, &raw mut found) };
        found != expected
    });
    Ok(elsewhere.map(|(input, _)| input.name()).collect())
}

/// Binds a value to an input. `IoBinding::bind_input` is no choice: it copies a tensor over memory that ONNX
/// Runtime does not own.
fn bind(binding: &mut IoBinding, name: &CString, value: &DynTensor) -> Result<(), ort::Error> {
    // SAFETY: all three pointers are of live objects. The binding shares the tensor, whose memory the caller
    // keeps: weights live beside the binding, and arguments are replaced before `run` returns.
    let status = unsafe { (ort::api().BindInput)(binding.ptr_mut(), name.as_ptr(), value.ptr()) };
    // SAFETY: the status comes from the call above and is used once.
    unsafe { ort::Error::result_from_status(status) }
}

fn c_string(name: &str) -> Result<CString, Error> {
    CString::new(name).map_err(|_| Error::Code(format!("the name {name:?} contains a zero byte")))
}
