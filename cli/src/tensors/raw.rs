//! Inputs from files of raw little-endian bytes.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use bytes::Bytes;
use millrace_client::{ModelMetadata, Tensor};
use millrace_types::DataType;

use crate::failure::CommandFailure;
use crate::tensors::{declared, shape};

/// An argument `NAME=FILE[:DTYPE:SHAPE]`. Without type and shape, the model's declaration applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RawInput {
    pub(crate) name: String,
    pub(crate) file: PathBuf,
    given: Option<(DataType, Vec<i64>)>,
}

impl FromStr for RawInput {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let usage =
            || format!("{text:?} is not NAME=FILE or NAME=FILE:DTYPE:SHAPE, such as x=x.bin:FP32:1x64");
        let (name, rest) = text.split_once('=').ok_or_else(usage)?;
        if name.is_empty() || rest.is_empty() {
            return Err(usage());
        }
        // Split from the right, because a file name may contain colons.
        let mut parts = rest.rsplitn(3, ':');
        let shape = parts.next();
        let datatype = parts.next();
        let file = parts.next();
        let (file, given) = match (file, datatype.and_then(|text| text.parse().ok()), shape) {
            (Some(file), Some(datatype), Some(dims)) => (file, Some((datatype, shape::parse(dims)?))),
            _ => (rest, None),
        };
        Ok(Self { name: name.to_owned(), file: PathBuf::from(file), given })
    }
}

impl RawInput {
    /// Converts the file's bytes to a tensor.
    pub(crate) fn tensor(&self, model: &ModelMetadata, data: Bytes) -> Result<Tensor, CommandFailure> {
        let input = declared(model, &self.name)?;
        let (datatype, shape) = match (&self.given, input.datatype.size()) {
            (Some((datatype, dims)), _) => (*datatype, dims.clone()),
            (None, Some(size)) if data.len().is_multiple_of(size) => {
                (input.datatype, shape::fill(input, data.len() / size)?)
            }
            (None, Some(size)) => {
                let message = format!(
                    "{}: {} bytes are not a whole number of {} values of {size} bytes",
                    self.file.display(),
                    data.len(),
                    input.datatype
                );
                return Err(CommandFailure::usage(message));
            }
            (None, None) => {
                return Err(CommandFailure::usage(format!("{}: BYTES need a shape", self.name))
                    .hint(format!("write --raw {}={}:BYTES:SHAPE", self.name, self.file.display())));
            }
        };
        Ok(Tensor::new(&self.name, datatype, shape, data).map_err(millrace_client::Error::from)?)
    }
}

/// Reads a whole file.
pub(crate) fn read(file: &Path) -> Result<Bytes, CommandFailure> {
    std::fs::read(file)
        .map(Bytes::from)
        .map_err(|error| CommandFailure::usage(format!("cannot read {}: {error}", file.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::model_of;

    fn parse(text: &str) -> RawInput {
        text.parse().unwrap()
    }

    #[test]
    fn type_and_shape_are_optional_and_colons_in_names_survive() {
        let given = Some((DataType::Fp32, vec![1, 64]));
        let name = "x".to_owned();
        let file = PathBuf::from("x.bin");
        assert_eq!(parse("x=x.bin:FP32:1x64"), RawInput { name: name.clone(), file: file.clone(), given });
        assert_eq!(parse("x=x.bin"), RawInput { name: name.clone(), file, given: None });
        assert_eq!(parse("x=a:b:c").file, PathBuf::from("a:b:c"));
        for bad in ["x.bin", "=x.bin", "x=", "x=f:FP32:1xN"] {
            assert!(bad.parse::<RawInput>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_declared_type_and_shape_apply_by_default() {
        let model = model_of(&[("x", DataType::Int32, &[-1, 2])]);
        let tensor = parse("x=f").tensor(&model, Bytes::from_static(&[0; 16])).unwrap();
        assert_eq!((tensor.datatype(), tensor.shape()), (DataType::Int32, &[2, 2][..]));
        assert!(parse("x=f").tensor(&model, Bytes::from_static(&[0; 15])).is_err());
        assert!(parse("y=f").tensor(&model, Bytes::new()).unwrap_err().hint.unwrap().contains('x'));
        assert!(parse("x=f:FP32:1x1").tensor(&model, Bytes::from_static(&[0; 5])).is_err());
    }
}
