//! The outputs of a run's response, and the outputs that stay on the GPU.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use millrace_engine::{Engine, Queue as _};
use millrace_proto::executor::Tensor;

use crate::memory::kept_outputs::{KeptOutput, KeptOutputs};
use crate::runs::batch::BatchRows;
use crate::runs::run_error::RunError;
use crate::socket::conversions::{self, DeclaredTensor, INLINE_BYTES_MAX};

/// The outputs that a run was asked for.
#[derive(Debug)]
pub(crate) struct RequestedOutputs {
    /// Names of the requested outputs. Empty selects every output.
    pub(crate) outputs: Vec<String>,
    /// Names of the requested outputs that stay on the GPU.
    pub(crate) kept: Vec<String>,
    /// Rows of the batched requests; `None` for a single request.
    pub(crate) rows: Option<BatchRows>,
}

impl RequestedOutputs {
    /// Returns the indices of the requested outputs, in the requested order. Fails if the outputs to
    /// keep are not requested or cannot be kept.
    pub(crate) fn wanted<V>(
        &self,
        run: u64,
        outputs: &[DeclaredTensor],
        kept: &KeptOutputs<V>,
    ) -> Result<Vec<usize>, RunError> {
        let place = |name: &String| {
            let place = outputs.iter().position(|output| output.name == *name);
            place.ok_or_else(|| RunError::OutputUnknown(name.clone()))
        };
        let wanted = match self.outputs.as_slice() {
            [] => (0..outputs.len()).collect(),
            asked => asked.iter().map(place).collect::<Result<Vec<_>, _>>()?,
        };
        let is_wanted = |name: &String| wanted.iter().any(|&index| outputs[index].name == *name);
        if let Some(name) = self.kept.iter().find(|name| !is_wanted(name)) {
            return Err(RunError::KeptUnknown(name.clone()));
        }
        if !self.kept.is_empty() {
            kept.admit(run)?;
        }
        Ok(wanted)
    }
}

/// A response that is being assembled.
#[derive(Debug)]
pub(crate) struct RunResponse<E: Engine> {
    outputs: Vec<Tensor>,
    descriptors: Vec<OwnedFd>,
    stays: Vec<Arc<KeptOutput<E::Value>>>,
}

impl<E: Engine> RunResponse<E> {
    pub(crate) fn new() -> Self {
        Self { outputs: Vec::new(), descriptors: Vec::new(), stays: Vec::new() }
    }

    /// Adds an output to the response. If the output stays on the GPU, the value is taken.
    pub(crate) fn add(
        &mut self,
        asked: &RequestedOutputs,
        kept: &KeptOutputs<E::Value>,
        DeclaredTensor { name, datatype }: &DeclaredTensor,
        value: &mut Option<E::Value>,
        launches: &mut E::Queue,
    ) -> Result<(), RunError> {
        let missing = || RunError::ValueMissing(name.clone());
        let made = value.as_ref().ok_or_else(missing)?;
        let shape = launches.shape(made, *datatype)?;
        if let Some(BatchRows { all, .. }) = asked.rows.filter(|rows| shape.first() != Some(&rows.all)) {
            return Err(RunError::OutputRows { name: name.clone(), shape, rows: all });
        }
        let size = datatype.size().unwrap_or_default() * shape.iter().product::<usize>();
        // The decision uses the largest request of a batch: if every request gets a small output, all
        // of them are sent inline.
        let largest = asked.rows.map_or(size, |rows| size / rows.all.max(1) * rows.most);
        let may_stay = largest > INLINE_BYTES_MAX && asked.kept.contains(name);
        let Some(room) = may_stay.then(|| kept.take_room(size as u64)).flatten() else {
            let tensor = launches.download(made, *datatype, INLINE_BYTES_MAX)?;
            self.outputs.push(conversions::output(name.clone(), tensor, &mut self.descriptors));
            return Ok(());
        };
        let value = launches.detach(value.take().ok_or_else(missing)?);
        let datatype = *datatype;
        let bytes = size as u64;
        self.outputs.push(conversions::kept_output(name.clone(), datatype, &shape, bytes));
        self.stays.push(Arc::new(KeptOutput { name: name.clone(), datatype, bytes, value, _room: room }));
        Ok(())
    }

    /// Stores the outputs that stay, and returns the tensors and descriptors to send.
    pub(crate) fn keep(self, run: u64, kept: &KeptOutputs<E::Value>) -> (Vec<Tensor>, Vec<OwnedFd>) {
        if !self.stays.is_empty() {
            kept.insert(run, self.stays);
        }
        (self.outputs, self.descriptors)
    }
}
