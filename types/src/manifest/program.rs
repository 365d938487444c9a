//! Parsing and checks of a function's program. A program in a file needs declared inputs and
//! outputs, because the file does not declare them. A stored program was packed with the
//! declaration.

use serde::Deserialize;

use super::field::FieldFault;
use super::source::{ModelSource, in_cluster};
use crate::signature::Signature;
use crate::tensor::{DataType, Dim, TensorSpec, UnknownDataType};

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
    // Parsed as text: YAML 1.1 parses the size `N` as a boolean.
    shape: Vec<String>,
}

impl ProgramText {
    /// Returns the source of the program and the number of its processes.
    pub(super) fn check(self) -> Result<(ModelSource, Option<u32>), FieldFault> {
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
                let problem = "a stored program includes its inputs and outputs: leave them out, or name the program's file instead of the digest";
                return Err(("spec.program", problem.into()));
            }
            _ => {
                let problem = "a program has a file, inputs and outputs, or the digest of a stored program: write program: {file: FILE, inputs: [...], outputs: [...]}";
                return Err(("spec.program", problem.into()));
            }
        };
        Ok((source, processes))
    }
}

fn tensors(field: &'static str, texts: Vec<TensorText>) -> Result<Vec<TensorSpec>, FieldFault> {
    texts.into_iter().map(|text| text.check(field)).collect()
}

impl TensorText {
    fn check(self, field: &'static str) -> Result<TensorSpec, FieldFault> {
        let Self { name, datatype, shape } = self;
        let datatype: DataType = datatype.parse().map_err(|error: UnknownDataType| {
            (field, format!("{name:?}: {error}: write one such as FP32 or UINT8"))
        })?;
        let dim = |(axis, dim): (usize, String)| match dim.parse::<i64>() {
            // A name of its own for each free size, because the sizes need not be equal.
            Ok(-1) => Ok(Dim::Symbol(format!("{name}.{axis}"))),
            Ok(size @ 1..) => Ok(Dim::Fixed(size.unsigned_abs())),
            Err(_) if dim.starts_with(char::is_alphabetic) => Ok(Dim::Symbol(dim)),
            _ => {
                let problem = "write a number from 1, or -1 or a name for a free size";
                Err((field, format!("{name:?} has the size {dim:?}: {problem}")))
            }
        };
        let shape = shape.into_iter().enumerate().map(dim).collect::<Result<_, _>>()?;
        Ok(TensorSpec { name, datatype, shape })
    }
}
