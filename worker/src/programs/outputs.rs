//! The check of a process's outputs against the function's declaration: names, types, shapes and sizes.
//! Memory from the process must be sealed, so that the process can no longer change it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use millrace_proto::function as wire;
use millrace_proto::function::tensor;
use millrace_types::tensor::{element_count, shape_text};
use millrace_types::{Bytes, DataId, Dim, Epoch, NodeName, TensorSpec};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::objects::{Contents, InputTensor, ObjectStore, seal};
use crate::port::Descriptor;
use crate::request::OutputRemark;
use crate::tensors::{self, PackedTensors};

/// The checked outputs of a process, packed for the service.
#[derive(Debug)]
pub(crate) struct CheckedOutputs {
    pub(crate) packed: PackedTensors,
    pub(crate) marks: BTreeMap<String, OutputRemark>,
}

/// Checks the requested outputs of an answer. `stored` holds the objects among the outputs that the process
/// stored and that no earlier answer named.
///
/// # Errors
/// The first fault, as a message for the function's owner.
pub(crate) fn read(
    outputs: Vec<wire::Tensor>,
    descriptors: &[Descriptor],
    declared: &[TensorSpec],
    wanted: &[String],
    stored: &BTreeSet<DataId>,
    objects: &ObjectStore,
    output_max: Bytes,
) -> Result<CheckedOutputs, String> {
    let mut came: BTreeMap<String, wire::Tensor> =
        outputs.into_iter().map(|output| (output.name.clone(), output)).collect();
    let mut inputs = Vec::new();
    let mut marks = BTreeMap::new();
    let mut own = stored.clone();
    let is_wanted = |spec: &&TensorSpec| wanted.is_empty() || wanted.contains(&spec.name);
    for spec in declared.iter().filter(is_wanted) {
        let name = &spec.name;
        let wire::Tensor { datatype, shape, contents, bytes, response, .. } =
            came.remove(name).ok_or_else(|| format!("the process returned no output {name:?}"))?;
        if datatype != spec.datatype.as_str() || !fits(&spec.shape, &shape) {
            let expected = spec.datatype;
            let sizes = shape_text(&spec.shape);
            return Err(format!(
                "output {name:?} is {datatype} of shape {shape:?}, but the function declares {expected} of shape {sizes}"
            ));
        }
        let mut mark = OutputRemark { object: None, response };
        let contents = match contents {
            None => return Err(format!("output {name:?} has no contents")),
            Some(tensor::Contents::Inline(data)) => Contents::Inline(data),
            Some(tensor::Contents::ContentsFd(place)) => {
                // Checked against the declared size, because a sparse memfd may be larger than the
                // machine's memory.
                if bytes > output_max.get() {
                    return Err(format!(
                        "output {name:?} of {bytes} bytes is over the limit of an answer, {output_max}, and the worker has no object memory left for it: return less, or raise the worker's message limit or object memory"
                    ));
                }
                let fd = descriptors
                    .get(place as usize)
                    .ok_or_else(|| format!("output {name:?} names a descriptor that was not sent"))?;
                memory(fd, bytes).map_err(|error| format!("output {name:?}: {error}"))?
            }
            Some(tensor::Contents::Object(id)) => {
                let id = data_id(&id).ok_or_else(|| format!("output {name:?} has an invalid data id"))?;
                let found = objects.find(&id);
                let found =
                    found.ok_or_else(|| format!("output {name:?}: data {id} is not on this worker"))?;
                // Only an object that this process stored belongs to the answer, and only to the first
                // output that names it. Later outputs with the same object are kept under names of their
                // own.
                mark.object = own.take(&id);
                found
            }
        };
        let size = spec.datatype.size().zip(element_count(&shape)).and_then(|(size, n)| n.checked_mul(size));
        if size.map(|size| size as u64) != Some(contents.len()) {
            return Err(format!(
                "output {name:?}: {} bytes do not make {datatype} of shape {shape:?}",
                contents.len()
            ));
        }
        marks.insert(name.clone(), mark);
        inputs.push(InputTensor { name: name.clone(), datatype, shape, contents });
    }
    Ok(CheckedOutputs { packed: tensors::given(inputs), marks })
}

/// Checks and seals memory from a process, so that the process can no longer write, shrink or grow it.
///
/// # Errors
/// The memory is not sealed against writes and shrinking, cannot be sealed against growth, or does not have
/// the declared size.
pub(crate) fn memory(fd: &Descriptor, bytes: u64) -> io::Result<Contents> {
    let seals = fcntl_get_seals(fd.as_fd())?;
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK) {
        return Err(io::Error::other("the memory is not sealed against changes"));
    }
    // Sealed before its size is read, because later code relies on the size.
    seal(fd)
        .map_err(|error| io::Error::other(format!("the memory cannot be sealed against growth: {error}")))?;
    if u64::try_from(fstat(fd)?.st_size) != Ok(bytes) {
        return Err(io::Error::other("the memory does not have the declared size"));
    }
    Ok(Contents::Memory { fd: Arc::clone(fd), bytes })
}

/// Parses a data id. Returns `None` if the node name is invalid.
pub(crate) fn data_id(wire: &wire::DataId) -> Option<DataId> {
    let home = NodeName::new(&wire.home).ok()?;
    Some(DataId { home, epoch: Epoch(wire.epoch), counter: wire.counter })
}

fn fits(declared: &[Dim], shape: &[i64]) -> bool {
    declared.len() == shape.len()
        && declared.iter().zip(shape).all(|(dim, &size)| match dim {
            Dim::Fixed(fixed) => u64::try_from(size) == Ok(*fixed),
            Dim::Symbol(_) => size >= 0,
        })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::time::Duration;

    use millrace_types::DataType;
    use rustix::fs::fcntl_add_seals;

    use super::*;

    fn spec(name: &str) -> TensorSpec {
        TensorSpec { name: name.into(), datatype: DataType::Uint8, shape: vec![Dim::Fixed(4)] }
    }

    fn named(name: &str, id: &DataId) -> wire::Tensor {
        let id = wire::DataId { home: id.home.to_string(), epoch: id.epoch.0, counter: id.counter };
        wire::Tensor {
            name: name.into(),
            datatype: "UINT8".into(),
            shape: vec![4],
            contents: Some(tensor::Contents::Object(id)),
            ..wire::Tensor::default()
        }
    }

    #[test]
    fn memory_that_is_not_sealed_or_not_of_the_declared_size_is_refused() {
        let made = |seals| -> Descriptor {
            let mut file = crate::objects::memory("test").unwrap();
            file.write_all(b"abcd").unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            Arc::new(file.into())
        };
        for seals in [SealFlags::empty(), SealFlags::WRITE, SealFlags::SHRINK] {
            let error = memory(&made(seals), 4).unwrap_err();
            assert!(error.to_string().contains("not sealed"), "{error}");
        }
        let fixed = made(SealFlags::WRITE | SealFlags::SHRINK);
        assert!(memory(&fixed, 3).is_err() && memory(&fixed, 5).is_err());
        assert_eq!(memory(&fixed, 4).unwrap().len(), 4);
        assert!(rustix::fs::ftruncate(&fixed, 5).is_err(), "the memory is sealed against growth");
        let last = made(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::SEAL);
        assert!(memory(&last, 4).is_err(), "the memory can grow, and takes no more seals");
    }

    #[tokio::test]
    async fn an_object_in_several_outputs_belongs_to_the_first() {
        let (objects, _told) = ObjectStore::registered(Bytes::mib(1));
        let contents = Contents::Inline(vec![7u8; 4].into());
        let id = objects.keep(contents, Duration::from_secs(60)).await.unwrap();
        let outputs = ["c", "b", "a"].map(|name| named(name, &id)).into();
        let declared = ["a", "b", "c"].map(spec);
        let stored = BTreeSet::from([id.clone()]);
        let answered = read(outputs, &[], &declared, &[], &stored, &objects, Bytes::mib(1)).unwrap();
        let objects: Vec<_> = answered.marks.into_values().map(|mark| mark.object).collect();
        assert_eq!(objects, [Some(id), None, None]);
    }
}
