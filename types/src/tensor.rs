//! Element types and shapes of tensors, under the names of the Open Inference Protocol.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A tensor's element type. On the wire, elements are little-endian and in row-major order.
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
    /// All datatypes of the protocol.
    pub const ALL: [Self; 14] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Bf16,
        Self::Fp32,
        Self::Fp64,
        Self::Bytes,
    ];

    /// Returns the protocol's name.
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

    /// Returns the size of an element in bytes; `None` for [`DataType::Bytes`], whose elements
    /// carry their length.
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

/// The error for a name that is not a datatype of the protocol; holds the name.
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

/// A dimension of a declared shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dim {
    /// A fixed size, at least 1.
    Fixed(u64),
    /// A free size from 1. Equal names within a model mean equal sizes. Free dimensions without a
    /// name in the model get names of their own.
    Symbol(String),
}

impl Dim {
    /// Returns the protocol's number for the dimension: -1 if the dimension is free.
    #[must_use]
    pub fn wire(&self) -> i64 {
        match self {
            Self::Fixed(n) => i64::try_from(*n).unwrap_or(i64::MAX),
            Self::Symbol(_) => -1,
        }
    }
}

/// A model's declaration of an input or output.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// The tensor's name in the model.
    pub name: String,
    /// The element type.
    pub datatype: DataType,
    /// The shape; empty for a scalar.
    pub shape: Vec<Dim>,
}

impl TensorSpec {
    /// Returns the shape in the protocol's numbers.
    #[must_use]
    pub fn wire_shape(&self) -> Vec<i64> {
        self.shape.iter().map(Dim::wire).collect()
    }
}

/// Returns the number of elements in a concrete shape; `None` if a dimension is negative or the
/// product overflows.
#[must_use]
pub fn element_count(shape: &[i64]) -> Option<usize> {
    shape.iter().try_fold(1usize, |count, &dim| count.checked_mul(usize::try_from(dim).ok()?))
}

/// An input of a request, without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestInput<'a> {
    /// The input's name.
    pub name: &'a str,
    /// The element type.
    pub datatype: DataType,
    /// The shape, with a number for every dimension.
    pub shape: &'a [i64],
}

/// The mismatch between a request's inputs and the model's declaration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    /// The model has no such input.
    #[error("input {name:?} is unknown: the model takes {}", quoted(known))]
    Unknown {
        /// The name in the request.
        name: String,
        /// The names that the model has.
        known: Vec<String>,
    },
    /// The request has the same input twice.
    #[error("input {name:?} was sent twice: send each input once")]
    Duplicate {
        /// The repeated name.
        name: String,
    },
    /// The request lacks an input of the model.
    #[error("input {:?} is missing: send {} of shape {}", .expected.name, .expected.datatype, shape_text(&.expected.shape))]
    Missing {
        /// The model's declaration of the input.
        expected: TensorSpec,
    },
    /// The input has another element type.
    #[error("input {name:?} has datatype {found}: the model takes {expected}")]
    DataType {
        /// The input's name.
        name: String,
        /// The declared element type.
        expected: DataType,
        /// The element type in the request.
        found: DataType,
    },
    /// The input has another number of dimensions, another size of a fixed dimension, or a
    /// dimension below 1.
    #[error("input {name:?} has shape {found:?}: the model takes {}", shape_text(expected))]
    Shape {
        /// The input's name.
        name: String,
        /// The declared shape.
        expected: Vec<Dim>,
        /// The shape in the request.
        found: Vec<i64>,
    },
    /// Dimensions that share a symbol have different sizes.
    #[error(
        "dimension {symbol:?} is {first} in input {first_name:?} and {second} in input \
         {second_name:?}: it must be the same everywhere"
    )]
    Symbol {
        /// The symbol that the dimensions share.
        symbol: String,
        /// The name of the first input with the symbol, in the order sent.
        first_name: String,
        /// The symbol's size in the first input.
        first: i64,
        /// The name of the input that disagrees.
        second_name: String,
        /// The symbol's size in the input that disagrees.
        second: i64,
    },
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

/// Formats a declared shape for messages: `[N, 3, 224, 224]`.
#[must_use]
pub fn shape_text(shape: &[Dim]) -> String {
    let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
    format!("[{}]", dims.join(", "))
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(n) => write!(f, "{n}"),
            Self::Symbol(name) => f.write_str(name),
        }
    }
}

/// Checks a request's inputs against the model's declaration: each input is present once, no other
/// input is present, and element types, ranks, fixed dimensions and shared symbols match. The codec
/// checks the sizes of the contents.
///
/// # Errors
/// [`InputError`] for the first fault in the order sent; a missing input is reported last.
pub fn check_inputs(specs: &[TensorSpec], given: &[RequestInput<'_>]) -> Result<(), InputError> {
    let mut seen: Vec<&str> = Vec::with_capacity(specs.len());
    let mut symbols: Vec<(&str, &str, i64)> = Vec::new();
    for input in given {
        let name = || input.name.to_owned();
        let Some(spec) = specs.iter().find(|spec| spec.name == input.name) else {
            let known = specs.iter().map(|spec| spec.name.clone()).collect();
            return Err(InputError::Unknown { name: name(), known });
        };
        if seen.contains(&input.name) {
            return Err(InputError::Duplicate { name: name() });
        }
        seen.push(input.name);
        if input.datatype != spec.datatype {
            return Err(InputError::DataType {
                name: name(),
                expected: spec.datatype,
                found: input.datatype,
            });
        }
        if !fits(&spec.shape, input.shape) {
            let expected = spec.shape.clone();
            let found = input.shape.to_vec();
            return Err(InputError::Shape { name: name(), expected, found });
        }
        for (dim, &size) in spec.shape.iter().zip(input.shape) {
            let Dim::Symbol(symbol) = dim else { continue };
            match symbols.iter().find(|(known, ..)| known == symbol) {
                None => symbols.push((symbol, input.name, size)),
                Some(&(_, first_name, first)) if first != size => {
                    return Err(InputError::Symbol {
                        symbol: symbol.clone(),
                        first_name: first_name.to_owned(),
                        first,
                        second_name: name(),
                        second: size,
                    });
                }
                Some(_) => {}
            }
        }
    }
    match specs.iter().find(|spec| !seen.contains(&spec.name.as_str())) {
        Some(missing) => Err(InputError::Missing { expected: missing.clone() }),
        None => Ok(()),
    }
}

/// Returns whether a concrete shape has the declared rank and fixed sizes, and no dimension below
/// 1.
fn fits(declared: &[Dim], shape: &[i64]) -> bool {
    declared.len() == shape.len()
        && declared.iter().zip(shape).all(|(dim, &size)| match dim {
            Dim::Fixed(n) => u64::try_from(size) == Ok(*n),
            Dim::Symbol(_) => size >= 1,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_datatypes_round_trip() {
        for datatype in DataType::ALL {
            assert_eq!(datatype.as_str().parse(), Ok(datatype));
        }
        assert!("FLOAT".parse::<DataType>().is_err());
    }

    #[test]
    fn element_counts_that_overflow_are_none() {
        assert_eq!(element_count(&[2, 3]), Some(6));
        assert_eq!(element_count(&[]), Some(1));
        assert_eq!(element_count(&[-1]), None);
        assert_eq!(element_count(&[i64::MAX, 4]), None);
    }

    fn specs() -> Vec<TensorSpec> {
        let n = || Dim::Symbol("N".into());
        let s = || Dim::Symbol("S".into());
        vec![
            TensorSpec { name: "ids".into(), datatype: DataType::Int64, shape: vec![n(), s()] },
            TensorSpec { name: "bias".into(), datatype: DataType::Fp32, shape: vec![n(), Dim::Fixed(4)] },
        ]
    }

    fn ids(shape: &[i64]) -> RequestInput<'_> {
        RequestInput { name: "ids", datatype: DataType::Int64, shape }
    }

    fn bias(shape: &[i64]) -> RequestInput<'_> {
        RequestInput { name: "bias", datatype: DataType::Fp32, shape }
    }

    #[test]
    fn matching_inputs_are_accepted_in_any_order() {
        assert_eq!(check_inputs(&specs(), &[ids(&[2, 7]), bias(&[2, 4])]), Ok(()));
        assert_eq!(check_inputs(&specs(), &[bias(&[1, 4]), ids(&[1, 9])]), Ok(()));
        assert_eq!(check_inputs(&[], &[]), Ok(()));
    }

    #[test]
    fn each_input_refusal_names_the_tensor_and_the_declaration() {
        let wrong_type = RequestInput { datatype: DataType::Int32, ..ids(&[2, 7]) };
        let stranger = RequestInput { name: "x", ..ids(&[2, 7]) };
        for (given, says) in [
            (vec![stranger], r#"input "x" is unknown: the model takes "ids", "bias""#),
            (vec![ids(&[2, 7]), ids(&[2, 7])], r#"input "ids" was sent twice: send each input once"#),
            (vec![ids(&[2, 7])], r#"input "bias" is missing: send FP32 of shape [N, 4]"#),
            (vec![wrong_type], r#"input "ids" has datatype INT32: the model takes INT64"#),
            (vec![ids(&[2])], r#"input "ids" has shape [2]: the model takes [N, S]"#),
            (vec![bias(&[2, 5])], r#"input "bias" has shape [2, 5]: the model takes [N, 4]"#),
            (vec![ids(&[0, 7])], r#"input "ids" has shape [0, 7]: the model takes [N, S]"#),
            (vec![ids(&[2, -1])], r#"input "ids" has shape [2, -1]: the model takes [N, S]"#),
            (
                vec![ids(&[2, 7]), bias(&[3, 4])],
                r#"dimension "N" is 2 in input "ids" and 3 in input "bias": it must be the same everywhere"#,
            ),
        ] {
            assert_eq!(check_inputs(&specs(), &given).unwrap_err().to_string(), says);
        }
    }

    #[test]
    fn a_symbol_with_two_sizes_in_one_input_is_refused() {
        let square = [TensorSpec {
            name: "a".into(),
            datatype: DataType::Fp32,
            shape: vec![Dim::Symbol("K".into()), Dim::Symbol("K".into())],
        }];
        let given = |shape| RequestInput { name: "a", datatype: DataType::Fp32, shape };
        assert_eq!(check_inputs(&square, &[given(&[3, 3])]), Ok(()));
        assert!(matches!(check_inputs(&square, &[given(&[3, 4])]), Err(InputError::Symbol { .. })));
    }
}
