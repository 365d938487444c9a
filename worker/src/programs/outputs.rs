//! What a process answered, checked against what its function declares: names, types, shapes, sizes,
//! and that memory it gave can no longer be changed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use millrace_proto::function as wire;
use millrace_proto::function::tensor;
use millrace_types::tensor::{element_count, shape_text};
use millrace_types::{Bytes, DataId, Dim, Epoch, NodeName, TensorSpec};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::objects::{Contents, Objects, seal};
use crate::port::Descriptor;
use crate::request::Mark;
use crate::service::tensors::{self, Input, Packed};

/// What a process answered, as the service takes it.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) packed: Packed,
    pub(super) marks: BTreeMap<String, Mark>,
}

/// Reads the outputs that are wanted of those that came; `stored` are those of the objects they name that
/// this process stored, and no answer had before.
///
/// # Errors
/// What is wrong with them, for the function's owner.
pub(super) fn read(
    outputs: Vec<wire::Tensor>,
    descriptors: &[Descriptor],
    declared: &[TensorSpec],
    wanted: &[String],
    stored: &BTreeSet<DataId>,
    (objects, output_max): (&Objects, Bytes),
) -> Result<Answered, String> {
    let mut came: BTreeMap<String, wire::Tensor> =
        outputs.into_iter().map(|output| (output.name.clone(), output)).collect();
    let mut inputs = Vec::new();
    let mut marks = BTreeMap::new();
    let mut own = stored.clone();
    let is_wanted = |spec: &&TensorSpec| wanted.is_empty() || wanted.contains(&spec.name);
    for spec in declared.iter().filter(is_wanted) {
        let name = &spec.name;
        let wire::Tensor { datatype, shape, contents, bytes, response, .. } =
            came.remove(name).ok_or_else(|| format!("it gave no output {name:?}"))?;
        if datatype != spec.datatype.as_str() || !fits(&spec.shape, &shape) {
            let (expected, sizes) = (spec.datatype, shape_text(&spec.shape));
            return Err(format!(
                "output {name:?} is {datatype} of shape {shape:?}, and {expected} of shape {sizes} is declared"
            ));
        }
        let mut mark = Mark { object: None, response };
        let contents = match contents {
            None => return Err(format!("output {name:?} has no contents")),
            Some(tensor::Contents::Inline(data)) => Contents::Inline(data),
            Some(tensor::Contents::ContentsFd(place)) => {
                // Its size is what it says: a process may give more than there is memory.
                if bytes > output_max.get() {
                    return Err(format!(
                        "output {name:?} of {bytes} bytes is over the {output_max} of an answer, and the worker has no room to keep it: give less, or raise the worker's message limit or object memory"
                    ));
                }
                let fd = descriptors.get(place as usize).ok_or("a descriptor did not come")?;
                memory(fd, bytes).map_err(|error| format!("output {name:?}: {error}"))?
            }
            Some(tensor::Contents::Object(id)) => {
                let id = data_id(&id).ok_or_else(|| format!("output {name:?} names no data"))?;
                let found = objects.find(&id);
                let found = found.ok_or_else(|| format!("output {name:?}: data {id} is not here"))?;
                // Another's object is not this answer's to keep or to let go of. Nor is one that an output
                // before has: it goes when that does, and whoever holds this one holds it by another name.
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
        inputs.push(Input { name: name.clone(), datatype, shape, contents });
    }
    Ok(Answered { packed: tensors::given(inputs), marks })
}

/// Memory from a process, which it can neither change nor cut any more, nor have grow.
///
/// # Errors
/// Where that is not so, or it is not as large as it says.
pub(super) fn memory(fd: &Descriptor, bytes: u64) -> io::Result<Contents> {
    let seals = fcntl_get_seals(fd.as_fd())?;
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK) {
        return Err(io::Error::other("its memory is not sealed against changes"));
    }
    // What its size is now is believed later on.
    seal(fd).map_err(|error| io::Error::other(format!("its memory can grow, for all seals: {error}")))?;
    if u64::try_from(fstat(fd)?.st_size) != Ok(bytes) {
        return Err(io::Error::other("its memory is not as large as it says"));
    }
    Ok(Contents::Memory { fd: Arc::clone(fd), bytes })
}

/// Reads a name of data.
pub(super) fn data_id(wire: &wire::DataId) -> Option<DataId> {
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
    fn memory_that_can_still_change_or_is_not_as_large_as_it_says_is_refused() {
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
        assert!(rustix::fs::ftruncate(&fixed, 5).is_err(), "it does not grow any more");
        let last = made(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::SEAL);
        assert!(memory(&last, 4).is_err(), "it can grow, and nobody can help it");
    }

    #[tokio::test]
    async fn of_outputs_that_are_one_object_the_first_has_its_name() {
        let (objects, _told) = Objects::registered(Bytes::mib(1));
        let contents = Contents::Inline(vec![7u8; 4].into());
        let id = objects.keep(contents, Duration::from_secs(60)).await.unwrap();
        let outputs = ["c", "b", "a"].map(|name| named(name, &id)).into();
        let (declared, stored) = (["a", "b", "c"].map(spec), BTreeSet::from([id.clone()]));
        let answered = read(outputs, &[], &declared, &[], &stored, (&objects, Bytes::mib(1))).unwrap();
        let objects: Vec<_> = answered.marks.into_values().map(|mark| mark.object).collect();
        assert_eq!(objects, [Some(id), None, None]);
    }
}
