//! The errors of an engine.

use millrace_device::DeviceLoss;
use millrace_types::DataType;

/// Reason why an engine refused a call or failed. The variant shows whether the caller, the model or
/// the device is at fault.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device refused a call or failed.
    #[error(transparent)]
    Device(#[from] millrace_device::Error),
    /// A model's graph cannot be loaded.
    #[error("cannot load the model: {0}")]
    Code(String),
    /// A kernel names a value that the model does not have.
    #[error("the model has no value named {0:?}")]
    UnknownValue(String),
    /// An input does not match its datatype and shape, or a value cannot be represented.
    #[error("{0}")]
    Tensor(String),
    /// The engine does not support this element type. The text lists the types that it supports.
    #[error("datatype {0} is not supported by this engine: use {1}")]
    DataType(DataType, &'static str),
    /// The library of ONNX Runtime cannot be opened, or ONNX Runtime failed outside loading and launching.
    #[error("cannot use ONNX Runtime: {0}")]
    Library(String),
    /// The model failed on these inputs.
    #[error("{0}")]
    Launch(String),
}

impl From<ort::Error> for Error {
    /// An error of ONNX Runtime outside loading and launching.
    fn from(error: ort::Error) -> Self {
        Self::Library(error.to_string())
    }
}

impl Error {
    /// Returns the part of the device that is lost, if the error says so.
    #[must_use]
    pub fn loss(&self) -> Option<DeviceLoss> {
        match self {
            Self::Device(error) => error.loss(),
            _ => None,
        }
    }
}
