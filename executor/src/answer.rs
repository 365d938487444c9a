//! What a run answers: which of its outputs, and which of them stay here.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use millrace_device::{Device, Stream as _};
use millrace_proto::executor::Tensor;

use crate::batch::Rows;
use crate::kept::{Kept, Output};
use crate::runs::Failed;
use crate::wire::{self, Declared, INLINE_BYTES_MAX};

/// What is asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    /// Empty: every output.
    pub(crate) outputs: Vec<String>,
    /// Those of them that stay here.
    pub(crate) kept: Vec<String>,
    /// Of requests that run as one.
    pub(crate) rows: Option<Rows>,
}

impl Asked {
    /// Which outputs, in the order asked; once it is known that those to be kept can be.
    pub(crate) fn wanted<V>(
        &self,
        run: u64,
        outputs: &[Declared],
        kept: &Kept<V>,
    ) -> Result<Vec<usize>, Failed> {
        let place = |name: &String| {
            let place = outputs.iter().position(|output| output.name == *name);
            place.ok_or_else(|| Failed::OutputUnknown(name.clone()))
        };
        let wanted = match self.outputs.as_slice() {
            [] => (0..outputs.len()).collect(),
            asked => asked.iter().map(place).collect::<Result<Vec<_>, _>>()?,
        };
        let is_wanted = |name: &String| wanted.iter().any(|&index| outputs[index].name == *name);
        if let Some(name) = self.kept.iter().find(|name| !is_wanted(name)) {
            return Err(Failed::KeptUnknown(name.clone()));
        }
        if !self.kept.is_empty() {
            kept.admit(run)?;
        }
        Ok(wanted)
    }
}

/// An answer as it is put together.
#[derive(Debug)]
pub(crate) struct Answer<D: Device> {
    outputs: Vec<Tensor>,
    descriptors: Vec<OwnedFd>,
    stays: Vec<Arc<Output<D::Value>>>,
}

impl<D: Device> Answer<D> {
    pub(crate) fn new() -> Self {
        Self { outputs: Vec::new(), descriptors: Vec::new(), stays: Vec::new() }
    }

    /// Adds one output; it is taken where it stays.
    pub(crate) fn add(
        &mut self,
        asked: &Asked,
        Declared { name, datatype }: &Declared,
        value: &mut Option<D::Value>,
        stream: &mut D::Stream,
    ) -> Result<(), Failed> {
        let missing = || Failed::ValueMissing(name.clone());
        let made = value.as_ref().ok_or_else(missing)?;
        let shape = stream.shape(made, *datatype)?;
        if let Some(Rows { all, .. }) = asked.rows.filter(|rows| shape.first() != Some(&rows.all)) {
            return Err(Failed::OutputRows { name: name.clone(), shape, rows: all });
        }
        let size = datatype.size().unwrap_or_default() * shape.iter().product::<usize>();
        // Of one request: where all are given little, they are given it together.
        let largest = asked.rows.map_or(size, |rows| size / rows.all.max(1) * rows.most);
        if largest <= INLINE_BYTES_MAX || !asked.kept.contains(name) {
            let tensor = stream.download(made, *datatype, INLINE_BYTES_MAX)?;
            self.outputs.push(wire::output(name.clone(), tensor, &mut self.descriptors));
            return Ok(());
        }
        let value = stream.detach(value.take().ok_or_else(missing)?);
        let (datatype, bytes) = (*datatype, size as u64);
        self.outputs.push(wire::kept_output(name.clone(), datatype, &shape, bytes));
        self.stays.push(Arc::new(Output { name: name.clone(), datatype, bytes, value }));
        Ok(())
    }

    /// What to send, once what stays is kept.
    pub(crate) fn keep(self, run: u64, kept: &Kept<D::Value>) -> (Vec<Tensor>, Vec<OwnedFd>) {
        if !self.stays.is_empty() {
            kept.insert(run, self.stays);
        }
        (self.outputs, self.descriptors)
    }
}
