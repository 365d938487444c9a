//! Requests that run as one: their inputs are put together along the first dimension, and the outputs
//! go back whole, for the worker to cut. What does not fit together, or an output that has not a row
//! for each, fails the run: the worker then runs each request alone.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;

use millrace_device::{Contents, HostTensor};
use millrace_proto::executor::Tensor;

use crate::wire::{self, Descriptors};

/// Why requests do not run as one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Message(#[from] wire::Error),
    #[error("{inputs} inputs are not those of {members} requests")]
    Count { inputs: usize, members: usize },
    #[error("input {0:?} is there twice")]
    Twice(String),
    #[error("input {0:?} differs between the requests of a batch in more than its rows")]
    Unlike(String),
    #[error("the inputs of one request have different numbers of rows")]
    Rows,
    #[error("input {0:?} cannot be read: {1}")]
    Read(String, std::io::Error),
}

/// A run's inputs, and how many rows they have where they are several requests'.
pub(crate) type Inputs = (HashMap<String, HostTensor>, Option<usize>);

/// Reads the inputs of `members` requests, one request's after the other's; 0 and 1 are a single
/// one, which is taken as it is.
pub(crate) fn inputs(
    inputs: Vec<Tensor>,
    members: u32,
    descriptors: &mut Descriptors,
) -> Result<Inputs, Error> {
    let members = (members as usize).max(1);
    let each = inputs.len() / members;
    if each * members != inputs.len() || (members > 1 && each == 0) {
        return Err(Error::Count { inputs: inputs.len(), members });
    }
    let mut first = HashMap::with_capacity(each);
    let mut rest: HashMap<String, Vec<HostTensor>> = HashMap::new();
    let mut rows = vec![None; members];
    for (place, input) in inputs.into_iter().enumerate() {
        let (name, tensor) = wire::tensor(input, descriptors)?;
        if members > 1 {
            let of = &mut rows[place / each];
            let here = tensor.shape.first().copied().ok_or_else(|| Error::Unlike(name.clone()))?;
            if *of.get_or_insert(here) != here {
                return Err(Error::Rows);
            }
        }
        if place < each {
            if first.insert(name.clone(), tensor).is_some() {
                return Err(Error::Twice(name));
            }
        } else {
            rest.entry(name).or_default().push(tensor);
        }
    }
    if members == 1 {
        return Ok((first, None));
    }
    let joined = first.into_iter().map(|(name, tensor)| {
        let others = rest.remove(&name).filter(|others| others.len() == members - 1);
        let others = others.ok_or_else(|| Error::Unlike(name.clone()))?;
        let tensor = join(&name, tensor, others)?;
        Ok((name, tensor))
    });
    let joined = joined.collect::<Result<_, Error>>()?;
    match rest.into_keys().min() {
        Some(name) => Err(Error::Unlike(name)),
        None => Ok((joined, Some(rows.into_iter().flatten().sum()))),
    }
}

fn join(name: &str, first: HostTensor, others: Vec<HostTensor>) -> Result<HostTensor, Error> {
    let alike = |other: &HostTensor| other.datatype == first.datatype && other.shape[1..] == first.shape[1..];
    if !others.iter().all(alike) {
        return Err(Error::Unlike(name.to_owned()));
    }
    let (datatype, mut shape) = (first.datatype, first.shape);
    shape[0] += others.iter().map(|other| other.shape[0]).sum::<usize>();
    let mut bytes = Vec::new();
    for contents in std::iter::once(first.contents).chain(others.into_iter().map(|other| other.contents)) {
        append(&mut bytes, contents).map_err(|error| Error::Read(name.to_owned(), error))?;
    }
    Ok(HostTensor { datatype, shape, contents: Contents::Inline(bytes.into()) })
}

fn append(bytes: &mut Vec<u8>, contents: Contents) -> std::io::Result<()> {
    match contents {
        Contents::Inline(more) => bytes.extend_from_slice(&more),
        Contents::File(file) => read_all(bytes, file)?,
    }
    Ok(())
}

fn read_all(bytes: &mut Vec<u8>, file: OwnedFd) -> std::io::Result<()> {
    let file = File::from(file);
    let (before, size) = (bytes.len(), usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX));
    bytes.resize(before + size, 0);
    file.read_exact_at(&mut bytes[before..], 0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use millrace_proto::executor::tensor::Contents as Wire;

    use super::*;

    fn tensor(name: &str, shape: &[i64], byte: u8) -> Tensor {
        let count = shape.iter().product::<i64>() as usize;
        let contents = Some(Wire::Inline(vec![byte; count].into()));
        Tensor { name: name.into(), datatype: "UINT8".into(), shape: shape.to_vec(), contents }
    }

    fn join(tensors: Vec<Tensor>, members: u32) -> Result<Inputs, Error> {
        inputs(tensors, members, &mut Descriptors::new(Vec::new()))
    }

    #[test]
    fn rows_are_put_one_after_the_other_by_name() {
        let given = vec![
            tensor("x", &[1, 2], 1),
            tensor("y", &[1], 2),
            tensor("y", &[2], 3),
            tensor("x", &[2, 2], 4),
        ];
        let (joined, rows) = join(given, 2).unwrap();
        assert_eq!(rows, Some(3));
        let bytes = |name: &str| match &joined[name].contents {
            Contents::Inline(bytes) => bytes.to_vec(),
            Contents::File(_) => unreachable!("it is inline"),
        };
        assert_eq!((bytes("x"), &joined["x"].shape[..]), (vec![1, 1, 4, 4, 4, 4], &[3, 2][..]));
        assert_eq!((bytes("y"), &joined["y"].shape[..]), (vec![2, 3, 3], &[3][..]));
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let x = |shape: &[i64]| tensor("x", shape, 0);
        assert!(matches!(join(vec![x(&[1, 2]), x(&[1, 3])], 2), Err(Error::Unlike(_))));
        assert!(matches!(join(vec![x(&[1]), tensor("y", &[1], 0)], 2), Err(Error::Unlike(_))));
        assert!(matches!(join(vec![x(&[]), x(&[])], 2), Err(Error::Unlike(_))));
        assert!(matches!(join(vec![x(&[1]), x(&[1]), x(&[1])], 2), Err(Error::Count { .. })));
        assert!(matches!(join(vec![], 2), Err(Error::Count { .. })));
        let uneven = vec![x(&[1]), tensor("y", &[2], 0), x(&[1]), tensor("y", &[1], 0)];
        assert!(matches!(join(uneven, 2), Err(Error::Rows)));
        let twice = vec![x(&[1]), x(&[1]), x(&[1]), x(&[1])];
        assert!(matches!(join(twice, 2), Err(Error::Twice(_))));
        assert!(matches!(join(vec![x(&[1]), x(&[1])], 1), Err(Error::Twice(_))));
    }

    #[test]
    fn a_single_request_is_taken_as_it_is() {
        for members in [0, 1] {
            let (inputs, rows) = join(vec![tensor("x", &[], 9)], members).unwrap();
            assert_eq!((inputs.len(), rows), (1, None));
        }
    }
}
