//! Conversion of typed tensor contents to raw bytes. The datatype determines the list with a tensor's
//! elements. FP16 and BF16 have no list, and are sent raw.

use bytes::{BufMut as _, Bytes, BytesMut};
use millrace_proto::inference::InferTensorContents;
use millrace_types::{DataType, Failure, Reason};

/// Returns the number of elements in all lists.
pub(super) fn elements(typed: &InferTensorContents) -> usize {
    typed.bool_contents.len()
        + typed.int_contents.len()
        + typed.int64_contents.len()
        + typed.uint_contents.len()
        + typed.uint64_contents.len()
        + typed.fp32_contents.len()
        + typed.fp64_contents.len()
        + typed.bytes_contents.len()
}

/// Converts the elements to raw bytes. `size` is the total number of bytes that the datatype and
/// shape require.
pub(super) fn raw(
    name: &str,
    datatype: DataType,
    size: usize,
    typed: &InferTensorContents,
) -> Result<Bytes, Failure> {
    let writer = Writer { name, datatype, size };
    writer.refuse_other_lists(typed)?;
    match datatype {
        DataType::Bool => writer.each(&typed.bool_contents, |flag| Some([u8::from(flag)])),
        DataType::Int8 => writer.each(&typed.int_contents, |n| Some(i8::try_from(n).ok()?.to_le_bytes())),
        DataType::Int16 => writer.each(&typed.int_contents, |n| Some(i16::try_from(n).ok()?.to_le_bytes())),
        DataType::Int32 => writer.each(&typed.int_contents, |n| Some(n.to_le_bytes())),
        DataType::Int64 => writer.each(&typed.int64_contents, |n| Some(n.to_le_bytes())),
        DataType::Uint8 => writer.each(&typed.uint_contents, |n| Some(u8::try_from(n).ok()?.to_le_bytes())),
        DataType::Uint16 => writer.each(&typed.uint_contents, |n| Some(u16::try_from(n).ok()?.to_le_bytes())),
        DataType::Uint32 => writer.each(&typed.uint_contents, |n| Some(n.to_le_bytes())),
        DataType::Uint64 => writer.each(&typed.uint64_contents, |n| Some(n.to_le_bytes())),
        DataType::Fp32 => writer.each(&typed.fp32_contents, |x| Some(x.to_le_bytes())),
        DataType::Fp64 => writer.each(&typed.fp64_contents, |x| Some(x.to_le_bytes())),
        DataType::Fp16 | DataType::Bf16 | DataType::Bytes => {
            Err(writer.invalid(format!("{datatype} has no typed contents: send raw_input_contents")))
        }
    }
}

struct Writer<'a> {
    name: &'a str,
    datatype: DataType,
    size: usize,
}

impl Writer<'_> {
    fn invalid(&self, why: String) -> Failure {
        Failure::new(Reason::InvalidInput, format!("input {:?}: {why}", self.name))
    }

    fn each<T: Copy, const N: usize>(
        &self,
        elements: &[T],
        bytes: impl Fn(T) -> Option<[u8; N]>,
    ) -> Result<Bytes, Failure> {
        if elements.len() * N != self.size {
            let found = elements.len();
            let expected = self.size / N;
            return Err(
                self.invalid(format!("the contents have {found} elements, but the shape needs {expected}"))
            );
        }
        let mut raw = BytesMut::with_capacity(self.size);
        for &element in elements {
            let out_of_range = || self.invalid(format!("an element is out of {}'s range", self.datatype));
            raw.put_slice(&bytes(element).ok_or_else(out_of_range)?);
        }
        Ok(raw.freeze())
    }

    /// Refuses elements in the list of another datatype, which would otherwise be ignored without notice.
    fn refuse_other_lists(&self, typed: &InferTensorContents) -> Result<(), Failure> {
        use DataType::{Bool, Bytes, Fp32, Fp64, Int8, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64};
        let lists: [(&str, bool, &[DataType]); 8] = [
            ("bool_contents", typed.bool_contents.is_empty(), &[Bool]),
            ("int_contents", typed.int_contents.is_empty(), &[Int8, Int16, Int32]),
            ("int64_contents", typed.int64_contents.is_empty(), &[Int64]),
            ("uint_contents", typed.uint_contents.is_empty(), &[Uint8, Uint16, Uint32]),
            ("uint64_contents", typed.uint64_contents.is_empty(), &[Uint64]),
            ("fp32_contents", typed.fp32_contents.is_empty(), &[Fp32]),
            ("fp64_contents", typed.fp64_contents.is_empty(), &[Fp64]),
            ("bytes_contents", typed.bytes_contents.is_empty(), &[Bytes]),
        ];
        let stray = lists.iter().find(|(_, empty, types)| !empty && !types.contains(&self.datatype));
        match stray {
            Some((list, ..)) => {
                Err(self.invalid(format!("{list} cannot contain {} elements", self.datatype)))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_integers_are_read_from_wide_lists_and_must_fit() {
        let typed = InferTensorContents { int_contents: vec![-1, 127], ..Default::default() };
        assert_eq!(raw("x", DataType::Int8, 2, &typed).unwrap(), [0xff, 0x7f].as_slice());
        assert_eq!(raw("x", DataType::Int16, 4, &typed).unwrap(), [0xff, 0xff, 0x7f, 0].as_slice());
        let wide = InferTensorContents { int_contents: vec![128], ..Default::default() };
        assert!(raw("x", DataType::Int8, 1, &wide).unwrap_err().message.contains("range"));
        let wide = InferTensorContents { uint_contents: vec![65_536], ..Default::default() };
        assert!(raw("x", DataType::Uint16, 2, &wide).is_err());
    }

    #[test]
    fn every_datatype_with_a_list_is_converted_to_raw_bytes() {
        let all = |datatype, size, typed: &InferTensorContents| raw("x", datatype, size, typed).unwrap();
        let typed = InferTensorContents { bool_contents: vec![true, false], ..Default::default() };
        assert_eq!(all(DataType::Bool, 2, &typed), [1, 0].as_slice());
        let typed = InferTensorContents { uint_contents: vec![7], ..Default::default() };
        assert_eq!(all(DataType::Uint8, 1, &typed), [7].as_slice());
        assert_eq!(all(DataType::Uint32, 4, &typed), [7, 0, 0, 0].as_slice());
        let typed = InferTensorContents { int64_contents: vec![-2], ..Default::default() };
        assert_eq!(all(DataType::Int64, 8, &typed), (-2i64).to_le_bytes().as_slice());
        let typed = InferTensorContents { uint64_contents: vec![9], ..Default::default() };
        assert_eq!(all(DataType::Uint64, 8, &typed), 9u64.to_le_bytes().as_slice());
        let typed = InferTensorContents { fp32_contents: vec![1.5], ..Default::default() };
        assert_eq!(all(DataType::Fp32, 4, &typed), 1.5f32.to_le_bytes().as_slice());
        let typed = InferTensorContents { fp64_contents: vec![f64::NAN], ..Default::default() };
        assert_eq!(all(DataType::Fp64, 8, &typed), f64::NAN.to_le_bytes().as_slice());
    }

    #[test]
    fn a_wrong_count_a_wrong_list_and_types_without_a_list_are_refused() {
        let typed = InferTensorContents { fp32_contents: vec![1.0; 3], ..Default::default() };
        assert!(raw("x", DataType::Fp32, 8, &typed).unwrap_err().message.contains("3 elements"));
        assert!(raw("x", DataType::Int32, 12, &typed).unwrap_err().message.contains("fp32_contents"));
        assert!(raw("x", DataType::Fp16, 0, &InferTensorContents::default()).is_err());
    }
}
