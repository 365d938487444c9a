//! Tensors with a name, a type, a shape and little-endian bytes.

use bytes::{BufMut as _, Bytes, BytesMut};
use millrace_proto::inference::InferTensorContents;
use millrace_types::DataType;
use millrace_types::tensor::element_count;

/// A tensor whose byte count is checked against its type and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    name: String,
    datatype: DataType,
    shape: Vec<i64>,
    data: Bytes,
}

/// The error of creating or reading a [`Tensor`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// The shape has a negative dimension, or its element count overflows.
    #[error(
        "{name}: shape {shape:?} is invalid: every dimension must be at least 0, and the element count must not overflow"
    )]
    Shape {
        /// The tensor's name.
        name: String,
        /// The invalid shape.
        shape: Vec<i64>,
    },
    /// The byte count does not match the type and shape.
    #[error("{name}: {datatype} of shape {shape:?} needs {expected} bytes, got {found}")]
    Size {
        /// The tensor's name.
        name: String,
        /// The tensor's element type.
        datatype: DataType,
        /// The tensor's shape.
        shape: Vec<i64>,
        /// The byte count that the type and shape need.
        expected: usize,
        /// The byte count that was given.
        found: usize,
    },
    /// The BYTES elements are truncated, or their count differs from the shape's.
    #[error(
        "{name}: shape {shape:?} does not match its elements: write each as a little-endian u32 length and that many bytes"
    )]
    Elements {
        /// The tensor's name.
        name: String,
        /// The tensor's shape.
        shape: Vec<i64>,
    },
    /// The tensor was read as a type that it does not have.
    #[error("{name} holds {found}, not {wanted}")]
    Datatype {
        /// The tensor's name.
        name: String,
        /// The tensor's element type.
        found: DataType,
        /// The element type that the caller asked for.
        wanted: DataType,
    },
}

impl Tensor {
    /// Creates a tensor from its bytes: little-endian, with the last dimension varying fastest. For
    /// BYTES, each element follows its length as a little-endian u32.
    ///
    /// # Errors
    /// [`TensorError`] when the bytes do not match the shape.
    pub fn new(
        name: impl Into<String>,
        datatype: DataType,
        shape: Vec<i64>,
        data: Bytes,
    ) -> Result<Self, TensorError> {
        let name = name.into();
        let Some(count) = element_count(&shape) else { return Err(TensorError::Shape { name, shape }) };
        match datatype.size() {
            None if length_prefixed(&data).is_none_or(|elements| elements.len() != count) => {
                Err(TensorError::Elements { name, shape })
            }
            Some(size) if count.checked_mul(size) != Some(data.len()) => {
                let expected = count.saturating_mul(size);
                let found = data.len();
                Err(TensorError::Size { name, datatype, shape, expected, found })
            }
            _ => Ok(Self { name, datatype, shape, data }),
        }
    }

    /// Creates a tensor of 32-bit floats.
    ///
    /// # Errors
    /// [`TensorError`] when the number of values differs from the shape's.
    pub fn from_f32(name: impl Into<String>, shape: Vec<i64>, values: &[f32]) -> Result<Self, TensorError> {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::new(name, DataType::Fp32, shape, Bytes::from(data))
    }

    /// Returns the name of the model's input or output.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type of each element.
    #[must_use]
    pub fn datatype(&self) -> DataType {
        self.datatype
    }

    /// Returns the size of each dimension.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Returns the elements as little-endian bytes.
    #[must_use]
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// Returns the elements of an FP32 tensor.
    ///
    /// # Errors
    /// [`TensorError::Datatype`] when the element type is not FP32.
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorError> {
        self.expect_type(DataType::Fp32)?;
        let value = |chunk: &[u8; 4]| f32::from_le_bytes(*chunk);
        Ok(self.data.as_chunks().0.iter().map(value).collect())
    }

    /// Returns the elements of a BYTES tensor.
    ///
    /// # Errors
    /// [`TensorError::Datatype`] when the element type is not BYTES.
    pub fn to_byte_strings(&self) -> Result<Vec<Bytes>, TensorError> {
        self.expect_type(DataType::Bytes)?;
        Ok(length_prefixed(&self.data).unwrap_or_default())
    }

    fn expect_type(&self, wanted: DataType) -> Result<(), TensorError> {
        if self.datatype == wanted {
            return Ok(());
        }
        Err(TensorError::Datatype { name: self.name.clone(), found: self.datatype, wanted })
    }
}

/// Splits the contents of a BYTES tensor into elements. Returns `None` when an element is
/// truncated.
fn length_prefixed(data: &Bytes) -> Option<Vec<Bytes>> {
    let mut elements = Vec::new();
    let mut at = 0;
    while at < data.len() {
        let length = data.get(at..at + 4)?.try_into().map(u32::from_le_bytes).ok()?;
        let end = (at + 4).checked_add(usize::try_from(length).ok()?)?;
        if end > data.len() {
            return None;
        }
        elements.push(data.slice(at + 4..end));
        at = end;
    }
    Some(elements)
}

/// Converts contents that arrived as typed lists into raw bytes. Some servers answer with typed
/// lists.
pub(crate) fn raw_contents(datatype: DataType, contents: &InferTensorContents) -> Bytes {
    let mut raw = BytesMut::new();
    match datatype {
        DataType::Bool => contents.bool_contents.iter().for_each(|&value| raw.put_u8(u8::from(value))),
        DataType::Int8 => contents.int_contents.iter().for_each(|&value| raw.put_i8(value as i8)),
        DataType::Int16 => contents.int_contents.iter().for_each(|&value| raw.put_i16_le(value as i16)),
        DataType::Int32 => contents.int_contents.iter().for_each(|&value| raw.put_i32_le(value)),
        DataType::Int64 => contents.int64_contents.iter().for_each(|&value| raw.put_i64_le(value)),
        DataType::Uint8 => contents.uint_contents.iter().for_each(|&value| raw.put_u8(value as u8)),
        DataType::Uint16 => contents.uint_contents.iter().for_each(|&value| raw.put_u16_le(value as u16)),
        DataType::Uint32 => contents.uint_contents.iter().for_each(|&value| raw.put_u32_le(value)),
        DataType::Uint64 => contents.uint64_contents.iter().for_each(|&value| raw.put_u64_le(value)),
        DataType::Fp32 => contents.fp32_contents.iter().for_each(|&value| raw.put_f32_le(value)),
        DataType::Fp64 => contents.fp64_contents.iter().for_each(|&value| raw.put_f64_le(value)),
        DataType::Bytes => contents.bytes_contents.iter().for_each(|value| put_element(&mut raw, value)),
        // The protocol has no list for half-precision values: they always travel raw.
        DataType::Fp16 | DataType::Bf16 => {}
    }
    raw.freeze()
}

fn put_element(raw: &mut BytesMut, value: &Bytes) {
    raw.put_u32_le(u32::try_from(value.len()).unwrap_or(u32::MAX));
    raw.put_slice(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_round_trip_through_a_tensor() {
        let tensor = Tensor::from_f32("x", vec![1, 3], &[1.0, -2.5, 0.0]).unwrap();
        assert_eq!(tensor.to_f32().unwrap(), [1.0, -2.5, 0.0]);
        assert_eq!(tensor.data().len(), 12);
    }

    #[test]
    fn bytes_that_do_not_match_the_shape_are_refused() {
        let new = |shape: &[i64], bytes: usize| {
            Tensor::new("x", DataType::Fp32, shape.to_vec(), Bytes::from(vec![0; bytes]))
        };
        assert!(new(&[2, 2], 16).is_ok());
        assert!(new(&[], 4).is_ok());
        assert!(matches!(new(&[2, 2], 15), Err(TensorError::Size { expected: 16, found: 15, .. })));
        assert!(matches!(new(&[-1, 2], 16), Err(TensorError::Shape { .. })));
        assert!(matches!(new(&[i64::MAX, 3], 16), Err(TensorError::Shape { .. })));
        assert!(matches!(new(&[i64::MAX / 2], 16), Err(TensorError::Size { .. })));
    }

    #[test]
    fn byte_strings_are_split_and_checked() {
        let raw = Bytes::from_static(b"\x02\0\0\0hi\0\0\0\0");
        let tensor = Tensor::new("s", DataType::Bytes, vec![2], raw.clone()).unwrap();
        assert_eq!(tensor.to_byte_strings().unwrap(), ["hi", ""]);
        for (shape, bytes) in [(vec![1], raw.clone()), (vec![2], raw.slice(..7)), (vec![1], raw.slice(..5))] {
            assert!(matches!(
                Tensor::new("s", DataType::Bytes, shape, bytes),
                Err(TensorError::Elements { .. })
            ));
        }
    }

    #[test]
    fn a_tensor_is_not_read_as_another_type() {
        let tensor = Tensor::new("x", DataType::Int32, vec![1], Bytes::from_static(&[0; 4])).unwrap();
        assert_eq!(tensor.to_f32().unwrap_err().to_string(), "x holds INT32, not FP32");
    }

    #[test]
    fn typed_contents_are_converted_to_raw_bytes() {
        let contents = InferTensorContents { int_contents: vec![-1, 2], ..Default::default() };
        assert_eq!(raw_contents(DataType::Int8, &contents), [255u8, 2].as_slice());
        assert_eq!(raw_contents(DataType::Int16, &contents), [255u8, 255, 2, 0].as_slice());
        let contents = InferTensorContents { bytes_contents: vec!["hi".into()], ..Default::default() };
        assert_eq!(raw_contents(DataType::Bytes, &contents), b"\x02\0\0\0hi".as_slice());
    }
}
