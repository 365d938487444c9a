//! Tensors on the emulated device: rten's element types are f32, i32, i8 and u8. INT64 and BOOL
//! are held as i32.

use std::os::fd::AsFd;

use bytes::Bytes as Buffer;
use millrace_types::DataType;
use rten_tensor::prelude::*;
use rten_tensor::{Tensor, TensorView};

use crate::api::{Contents, HostTensor};
use crate::error::Error;
use crate::memfd;
use crate::pod::{Pod, bytes_of, bytes_of_mut};

/// A tensor on the device.
#[derive(Debug)]
pub struct Value(pub(super) rten::Value);

impl Value {
    pub(super) fn upload(tensor: HostTensor) -> Result<Self, Error> {
        let HostTensor { datatype, shape, contents } = tensor;
        let value = match datatype {
            DataType::Fp32 => from_shape(&shape, elements::<f32>(&shape, contents)?),
            DataType::Int32 => from_shape(&shape, elements::<i32>(&shape, contents)?),
            DataType::Int8 => from_shape(&shape, elements::<i8>(&shape, contents)?),
            DataType::Uint8 => from_shape(&shape, elements::<u8>(&shape, contents)?),
            DataType::Int64 => from_shape(&shape, narrowed(elements::<i64>(&shape, contents)?)?),
            DataType::Bool => {
                let bytes = elements::<u8>(&shape, contents)?;
                from_shape(&shape, bytes.into_iter().map(|byte| i32::from(byte != 0)).collect())
            }
            other => return Err(Error::DataType(other)),
        };
        Ok(Self(value))
    }

    pub(super) fn download(&self, datatype: DataType, inline_max: usize) -> Result<HostTensor, Error> {
        let view = self.0.as_view();
        let shape = view.shape().to_vec();
        let contents = match datatype {
            DataType::Fp32 => exact(&self.tensor::<f32>("FP32")?, inline_max),
            DataType::Int32 => exact(&self.tensor::<i32>("INT32")?, inline_max),
            DataType::Int8 => exact(&self.tensor::<i8>("INT8")?, inline_max),
            DataType::Uint8 => exact(&self.tensor::<u8>("UINT8")?, inline_max),
            DataType::Int64 => converted(&self.tensor::<i32>("INT64")?, inline_max, i64::from),
            DataType::Bool => converted(&self.tensor::<i32>("BOOL")?, inline_max, |x| u8::from(x != 0)),
            other => return Err(Error::DataType(other)),
        }?;
        Ok(HostTensor { datatype, shape, contents })
    }

    fn tensor<T>(&self, declared: &str) -> Result<TensorView<'_, T>, Error>
    where
        for<'a> TensorView<'a, T>: TryFrom<&'a rten::Value>,
    {
        self.0.as_tensor_view().ok_or_else(|| {
            Error::Tensor(format!("declared {declared}, but the model makes {:?}", self.0.dtype()))
        })
    }
}

fn from_shape<T>(shape: &[usize], elements: Vec<T>) -> rten::Value
where
    rten::Value: From<Tensor<T>>,
{
    Tensor::from_data(shape, elements).into()
}

/// A tensor's elements. Nothing is allocated before it is known that as many bytes have come.
fn elements<T: Pod>(shape: &[usize], contents: Contents) -> Result<Vec<T>, Error> {
    let due = shape.iter().try_fold(size_of::<T>(), |bytes, &dim| bytes.checked_mul(dim));
    let found = match &contents {
        Contents::Inline(bytes) => bytes.len() as u64,
        Contents::File(file) => memfd::size(file)?,
    };
    let due = due.filter(|&due| due as u64 == found).ok_or_else(|| {
        Error::Tensor(format!(
            "{found} bytes are not a tensor of shape {shape:?} with elements of {}",
            size_of::<T>()
        ))
    })?;
    let mut elements = vec![T::default(); due / size_of::<T>()];
    match contents {
        Contents::Inline(bytes) => bytes_of_mut(&mut elements).copy_from_slice(&bytes),
        Contents::File(file) => memfd::read_at(file.as_fd(), bytes_of_mut(&mut elements), 0)?,
    }
    Ok(elements)
}

fn narrowed(wide: Vec<i64>) -> Result<Vec<i32>, Error> {
    wide.into_iter()
        .enumerate()
        .map(|(index, element)| {
            i32::try_from(element).map_err(|_| {
                Error::Tensor(format!(
                    "element {index} is {element}: this device holds INT64 as 32 bits, from {} to {}",
                    i32::MIN,
                    i32::MAX
                ))
            })
        })
        .collect()
}

fn exact<T: Pod>(view: &TensorView<'_, T>, inline_max: usize) -> Result<Contents, Error> {
    match view.data() {
        Some(elements) => packed(bytes_of(elements), inline_max),
        None => packed(bytes_of(&view.to_vec()), inline_max),
    }
}

fn converted<T: Copy, U: Pod>(
    view: &TensorView<'_, T>,
    inline_max: usize,
    convert: impl Fn(T) -> U,
) -> Result<Contents, Error> {
    let elements: Vec<U> = view.iter().map(|&element| convert(element)).collect();
    packed(bytes_of(&elements), inline_max)
}

fn packed(bytes: &[u8], inline_max: usize) -> Result<Contents, Error> {
    if bytes.len() <= inline_max {
        return Ok(Contents::Inline(Buffer::copy_from_slice(bytes)));
    }
    let file = memfd::create("millrace-tensor", bytes.len() as u64)?;
    memfd::write_at(&file, bytes, 0)?;
    Ok(Contents::File(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inline(datatype: DataType, shape: &[usize], bytes: &[u8]) -> HostTensor {
        let contents = Contents::Inline(Buffer::copy_from_slice(bytes));
        HostTensor { datatype, shape: shape.to_vec(), contents }
    }

    fn bytes(tensor: HostTensor) -> Vec<u8> {
        match tensor.contents {
            Contents::Inline(bytes) => bytes.to_vec(),
            Contents::File(file) => {
                let mut bytes = vec![0; memfd::size(&file).unwrap() as usize];
                memfd::read_at(&file, &mut bytes, 0).unwrap();
                bytes
            }
        }
    }

    #[test]
    fn every_datatype_comes_back_as_it_went_inline_and_as_a_file() {
        for (datatype, sent) in [
            (DataType::Fp32, [1.5f32, -0.0, f32::MAX, 3.0].map(f32::to_le_bytes).concat()),
            (DataType::Int32, [1i32, -2, i32::MIN, 4].map(i32::to_le_bytes).concat()),
            (DataType::Int64, [1i64, -2, i32::MIN.into(), i32::MAX.into()].map(i64::to_le_bytes).concat()),
            (DataType::Int8, vec![1, 255, 128, 0]),
            (DataType::Uint8, vec![1, 255, 128, 0]),
            (DataType::Bool, vec![1, 0, 0, 1]),
        ] {
            for inline_max in [0, 64] {
                let value = Value::upload(inline(datatype, &[2, 2], &sent)).unwrap();
                let back = value.download(datatype, inline_max).unwrap();
                assert_eq!((back.datatype, &back.shape), (datatype, &vec![2, 2]));
                assert_eq!(matches!(back.contents, Contents::Inline(_)), inline_max > 0, "{datatype}");
                // What came back can be sent again, whichever way it came.
                let again = Value::upload(back).unwrap().download(datatype, 64).unwrap();
                assert_eq!(bytes(again), sent, "{datatype}");
            }
        }
    }

    #[test]
    fn an_int64_that_does_not_fit_is_refused_and_named() {
        let sent = [0i64, 1 << 31].map(i64::to_le_bytes).concat();
        let error = Value::upload(inline(DataType::Int64, &[2], &sent)).unwrap_err().to_string();
        assert!(error.contains("element 1 is 2147483648"), "{error}");
    }

    #[test]
    fn a_shape_that_does_not_match_its_bytes_is_refused() {
        for shape in [&[3][..], &[usize::MAX, 2], &[]] {
            let refused = Value::upload(inline(DataType::Fp32, shape, &[0; 8]));
            assert!(matches!(refused, Err(Error::Tensor(_))), "{shape:?}");
        }
        assert!(Value::upload(inline(DataType::Fp32, &[0, 4], &[])).is_ok());
        assert!(Value::upload(inline(DataType::Fp32, &[], &[0; 4])).is_ok());
    }

    #[test]
    fn types_that_the_device_lacks_or_the_model_does_not_make_are_refused() {
        let refused = Value::upload(inline(DataType::Fp64, &[1], &[0; 8]));
        assert!(matches!(refused, Err(Error::DataType(DataType::Fp64))));
        let value = Value::upload(inline(DataType::Fp32, &[1], &[0; 4])).unwrap();
        let error = value.download(DataType::Int64, 64).unwrap_err().to_string();
        assert!(error.contains("declared INT64"), "{error}");
    }
}
