//! What a manifest says of a function's program: its file, and what it takes and gives, which no file
//! says of itself.

use serde::Deserialize;

use super::Problem;
use super::function::File;
use crate::tensor::{DataType, Dim, TensorSpec, UnknownDataType};
use crate::workflow::Signature;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProgramText {
    file: String,
    processes: Option<u32>,
    inputs: Vec<TensorText>,
    outputs: Vec<TensorText>,
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
    pub(super) fn check(self) -> Result<File, Problem> {
        let tensors = |field, texts: Vec<TensorText>| {
            texts.into_iter().map(|text| text.check(field)).collect::<Result<Vec<_>, Problem>>()
        };
        let inputs = tensors("spec.program.inputs", self.inputs)?;
        let outputs = tensors("spec.program.outputs", self.outputs)?;
        let declared = Some(Signature { inputs, outputs });
        Ok(File { name: self.file, declared, processes: self.processes })
    }
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
