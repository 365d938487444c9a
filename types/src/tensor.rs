//! Element types and shapes, as the Open Inference Protocol names them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A tensor's element type. Bytes on the wire are little-endian, rows last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the protocol's own names")]
pub enum DataType {
    #[serde(rename = "BOOL")]
    Bool,
    #[serde(rename = "UINT8")]
    Uint8,
    #[serde(rename = "UINT16")]
    Uint16,
    #[serde(rename = "UINT32")]
    Uint32,
    #[serde(rename = "UINT64")]
    Uint64,
    #[serde(rename = "INT8")]
    Int8,
    #[serde(rename = "INT16")]
    Int16,
    #[serde(rename = "INT32")]
    Int32,
    #[serde(rename = "INT64")]
    Int64,
    #[serde(rename = "FP16")]
    Fp16,
    #[serde(rename = "BF16")]
    Bf16,
    #[serde(rename = "FP32")]
    Fp32,
    #[serde(rename = "FP64")]
    Fp64,
    #[serde(rename = "BYTES")]
    Bytes,
}

impl DataType {
    /// Every type the protocol knows.
    pub const ALL: [Self; 14] = [
        Self::Bool, Self::Uint8, Self::Uint16, Self::Uint32, Self::Uint64, Self::Int8, Self::Int16,
        Self::Int32, Self::Int64, Self::Fp16, Self::Bf16, Self::Fp32, Self::Fp64, Self::Bytes,
    ];

    /// The protocol's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Bf16 => "BF16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bytes => "BYTES",
        }
    }

    /// Bytes an element takes; `None` for [`DataType::Bytes`], whose elements carry their length.
    #[must_use]
    pub const fn size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A name that is none of the protocol's element types.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown datatype {0:?}")]
pub struct UnknownDataType(pub String);

impl FromStr for DataType {
    type Err = UnknownDataType;
    fn from_str(text: &str) -> Result<Self, UnknownDataType> {
        Self::ALL
            .into_iter()
            .find(|datatype| datatype.as_str() == text)
            .ok_or_else(|| UnknownDataType(text.to_owned()))
    }
}

/// One dimension of a declared shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dim {
    /// Always this many, at least 1.
    Fixed(u64),
    /// Any number from 1; equal names within a model mean equal numbers. A model that names none
    /// gets a name of its own for each.
    Symbol(String),
}

impl Dim {
    /// The protocol's number for it: -1 where it is free.
    #[must_use]
    pub fn wire(&self) -> i64 {
        match self {
            Self::Fixed(n) => i64::try_from(*n).unwrap_or(i64::MAX),
            Self::Symbol(_) => -1,
        }
    }
}

/// What a model declares of one input or output.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// The tensor's name in the model.
    pub name: String,
    /// Its element type.
    pub datatype: DataType,
    /// Its shape; empty for a scalar.
    pub shape: Vec<Dim>,
}

impl TensorSpec {
    /// The shape in the protocol's numbers.
    #[must_use]
    pub fn wire_shape(&self) -> Vec<i64> {
        self.shape.iter().map(Dim::wire).collect()
    }
}

/// Elements in a concrete shape; `None` when a dimension is negative or the product overflows.
#[must_use]
pub fn element_count(shape: &[i64]) -> Option<usize> {
    shape.iter().try_fold(1usize, |count, &dim| count.checked_mul(usize::try_from(dim).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for datatype in DataType::ALL {
            assert_eq!(datatype.as_str().parse(), Ok(datatype));
        }
        assert!("FLOAT".parse::<DataType>().is_err());
    }

    #[test]
    fn counts_elements_without_overflow() {
        assert_eq!(element_count(&[2, 3]), Some(6));
        assert_eq!(element_count(&[]), Some(1));
        assert_eq!(element_count(&[-1]), None);
        assert_eq!(element_count(&[i64::MAX, 4]), None);
    }
}
