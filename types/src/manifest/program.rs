//! What a manifest says of a function's program: its file, and what it takes and gives, which no file
//! says of itself. What the cluster has says it.

use serde::Deserialize;

use super::Problem;
use super::function::{ModelSource, in_cluster};
use crate::tensor::{DataType, Dim, TensorSpec, UnknownDataType};
use crate::workflow::Signature;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProgramText {
    file: Option<String>,
    digest: Option<String>,
    processes: Option<u32>,
    inputs: Option<Vec<TensorText>>,
    outputs: Option<Vec<TensorText>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorText {
    name: String,
    datatype: String,
    // Text, whatever it looks like: YAML takes N for a truth value.
    shape: Vec<String>,
}

impl ProgramText {
    /// Where it is, and how many processes it has.
    pub(super) fn check(self) -> Result<(ModelSource, Option<u32>), Problem> {
        let Self { file, digest, processes, inputs, outputs } = self;
        let source = match (file, digest, inputs, outputs) {
            (Some(path), None, ..) if path.is_empty() => {
                let problem = "is empty: name the program's file, relative to this one";
                return Err(("spec.program.file", problem.into()));
            }
            (Some(path), None, Some(inputs), Some(outputs)) => {
                let inputs = tensors("spec.program.inputs", inputs)?;
                let outputs = tensors("spec.program.outputs", outputs)?;
                ModelSource::File { path, declared: Some(Signature { inputs, outputs }) }
            }
            (None, Some(digest), None, None) => in_cluster("spec.program.digest", &digest)?,
            (None, Some(_), ..) => {
                let problem = "a program that the cluster has is packed with its inputs and outputs: leave them out, or name its file in place of the digest";
                return Err(("spec.program", problem.into()));
            }
            _ => {
                let problem = "a program has a file, inputs and outputs, or the digest of one that the cluster has: write program: {file: FILE, inputs: [...], outputs: [...]}";
                return Err(("spec.program", problem.into()));
            }
        };
        Ok((source, processes))
    }
}

fn tensors(field: &'static str, texts: Vec<TensorText>) -> Result<Vec<TensorSpec>, Problem> {
    texts.into_iter().map(|text| text.check(field)).collect()
}

impl TensorText {
    fn check(self, field: &'static str) -> Result<TensorSpec, Problem> {
        let Self { name, datatype, shape } = self;
        let datatype: DataType = datatype.parse().map_err(|error: UnknownDataType| {
            (field, format!("{name:?}: {error}: write one such as FP32 or UINT8"))
        })?;
        let dim = |(axis, dim): (usize, String)| match dim.parse::<i64>() {
            // One name for each: it need not be the same anywhere else.
            Ok(-1) => Ok(Dim::Symbol(format!("{name}.{axis}"))),
            Ok(size @ 1..) => Ok(Dim::Fixed(size.unsigned_abs())),
            Err(_) if dim.starts_with(char::is_alphabetic) => Ok(Dim::Symbol(dim)),
            _ => {
                let problem = "write each size from 1, or -1 or a name where it is free";
                Err((field, format!("{name:?} has the size {dim:?}: {problem}")))
            }
        };
        let shape = shape.into_iter().enumerate().map(dim).collect::<Result<_, _>>()?;
        Ok(TensorSpec { name, datatype, shape })
    }
}
