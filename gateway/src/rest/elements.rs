//! Conversion of a JSON tensor's elements, nested like its shape or flat, to raw bytes, and of raw
//! bytes to JSON.
//!
//! A JSON parser has already checked the text, so a single pass over its bytes is enough. Each number
//! is parsed as its own type, so the number is rounded only once.

use millrace_types::DataType;
use millrace_types::tensor::element_count;
use serde::ser::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::backend::NamedTensor;

/// Whether the elements of a datatype can be JSON numbers or booleans.
pub(crate) const fn has_json(datatype: DataType) -> bool {
    !matches!(datatype, DataType::Fp16 | DataType::Bf16 | DataType::Bytes)
}

/// Most characters of an element that an error message shows.
const SHOWN_MAX: usize = 32;

/// Returns the most bytes that the elements of a text can need: each element has a digit, and all
/// except the last have a comma.
pub(crate) fn bytes_max(data: &RawValue, datatype: DataType) -> usize {
    (data.get().len() / 2 + 1) * datatype.size().unwrap_or(0)
}

/// Parses `data` as the elements of a tensor with this datatype and shape; all dimensions must be at
/// least 1. The shape is only a claim of the client, so the allocated memory is bounded by the length
/// of the text. An error message describes the fault of the data.
pub(crate) fn read(data: &RawValue, datatype: DataType, shape: &[i64]) -> Result<Vec<u8>, String> {
    let no_json = || format!("{datatype} has no JSON form: send it as binary data");
    let write = writer(datatype).ok_or_else(no_json)?;
    let size = datatype.size().ok_or_else(no_json)?;
    let text = data.get().as_bytes();
    let count = element_count(shape).unwrap_or(usize::MAX);
    let nested = is_nested(text);
    let levels = if nested { shape } else { &[] };
    let mut scan = ArrayScan { levels, open: Vec::new(), nested, found: 0, count };
    let mut raw = Vec::new();
    let reserved = count.saturating_mul(size).min(bytes_max(data, datatype));
    raw.try_reserve_exact(reserved).map_err(|_| format!("cannot allocate {reserved} bytes"))?;
    let mut at = 0;
    while let Some(&c) = text.get(at) {
        at += 1;
        match c {
            b' ' | b'\t' | b'\n' | b'\r' | b',' => {}
            b'[' => scan.open()?,
            b']' => scan.close()?,
            b'"' | b'{' | b'}' => return Err(format!("data has a value that is not a {datatype} element")),
            _ => {
                let rest = &data.get()[at - 1..];
                let end = rest.find([',', ']', ' ', '\t', '\n', '\r']).unwrap_or(rest.len());
                let element = &rest[..end];
                scan.element()?;
                if !write(element, &mut raw) {
                    let shown: String = element.chars().take(SHOWN_MAX).collect();
                    return Err(format!("data has {shown}, which is not a {datatype} element"));
                }
                at += end - 1;
            }
        }
    }
    if scan.found != count {
        return Err(format!("data has {} elements, but its shape needs {count}", scan.found));
    }
    Ok(raw)
}

/// Whether the outermost array contains arrays.
fn is_nested(text: &[u8]) -> bool {
    let mut brackets = text.iter().filter(|c| !c.is_ascii_whitespace());
    brackets.next() == Some(&b'[') && brackets.next() == Some(&b'[')
}

/// The position of the pass in the arrays.
struct ArrayScan<'a> {
    /// Size of each level of nesting; empty if the data is flat.
    levels: &'a [i64],
    /// Number of elements so far in each open array, outermost first.
    open: Vec<i64>,
    nested: bool,
    found: usize,
    count: usize,
}

impl ArrayScan<'_> {
    fn misshapen(&self) -> String {
        "data is neither flat nor nested like its shape".to_owned()
    }

    fn open(&mut self) -> Result<(), String> {
        let deepest = if self.nested { self.levels.len() } else { 1 };
        if self.open.len() == deepest {
            return Err(self.misshapen());
        }
        if let Some(outer) = self.open.last_mut() {
            *outer += 1;
        }
        self.open.push(0);
        Ok(())
    }

    fn close(&mut self) -> Result<(), String> {
        let elements = self.open.pop();
        let expected = self.levels.get(self.open.len()).copied();
        if self.nested && elements != expected { Err(self.misshapen()) } else { Ok(()) }
    }

    fn element(&mut self) -> Result<(), String> {
        if self.nested && self.open.len() != self.levels.len() {
            return Err(self.misshapen());
        }
        if let Some(array) = self.open.last_mut() {
            *array += 1;
        }
        self.found += 1;
        if self.found > self.count {
            return Err(format!("data has more elements than the {} of its shape", self.count));
        }
        Ok(())
    }
}

/// Appends an element to the raw bytes. Returns false if the text is not an element of the type.
type Write = fn(&str, &mut Vec<u8>) -> bool;

fn writer(datatype: DataType) -> Option<Write> {
    macro_rules! number {
        ($type:ty) => {
            |text, raw| {
                let number = text.parse::<$type>();
                number.is_ok_and(|n| {
                    raw.extend_from_slice(&n.to_le_bytes());
                    true
                })
            }
        };
    }
    macro_rules! float {
        ($type:ty) => {
            |text, raw| {
                // JSON has no infinity, so a number that parses as infinity is out of range.
                let number = text.parse::<$type>().ok().filter(|x| x.is_finite());
                number.is_some_and(|x| {
                    raw.extend_from_slice(&x.to_le_bytes());
                    true
                })
            }
        };
    }
    let write: Write = match datatype {
        DataType::Bool => |text, raw| {
            let flag = text.parse::<bool>();
            flag.is_ok_and(|flag| {
                raw.push(u8::from(flag));
                true
            })
        },
        DataType::Int8 => number!(i8),
        DataType::Int16 => number!(i16),
        DataType::Int32 => number!(i32),
        DataType::Int64 => number!(i64),
        DataType::Uint8 => number!(u8),
        DataType::Uint16 => number!(u16),
        DataType::Uint32 => number!(u32),
        DataType::Uint64 => number!(u64),
        DataType::Fp32 => float!(f32),
        DataType::Fp64 => float!(f64),
        DataType::Fp16 | DataType::Bf16 | DataType::Bytes => return None,
    };
    Some(write)
}

/// The elements of a tensor as a flat JSON array. [`is_finite`] must be true for the tensor.
pub(crate) struct FlatJsonArray<'a>(pub(crate) &'a NamedTensor);

/// Whether JSON can represent every element; JSON has neither NaN nor infinity.
pub(crate) fn is_finite(tensor: &NamedTensor) -> bool {
    match tensor.datatype {
        DataType::Fp32 => elements(&tensor.data, f32::from_le_bytes).all(f32::is_finite),
        DataType::Fp64 => elements(&tensor.data, f64::from_le_bytes).all(f64::is_finite),
        _ => true,
    }
}

fn elements<T, const N: usize>(raw: &[u8], read: fn([u8; N]) -> T) -> impl Iterator<Item = T> {
    raw.as_chunks::<N>().0.iter().map(move |bytes| read(*bytes))
}

impl Serialize for FlatJsonArray<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let raw = &self.0.data;
        match self.0.datatype {
            DataType::Bool => to.collect_seq(raw.iter().map(|&byte| byte != 0)),
            DataType::Int8 => to.collect_seq(elements(raw, i8::from_le_bytes)),
            DataType::Int16 => to.collect_seq(elements(raw, i16::from_le_bytes)),
            DataType::Int32 => to.collect_seq(elements(raw, i32::from_le_bytes)),
            DataType::Int64 => to.collect_seq(elements(raw, i64::from_le_bytes)),
            DataType::Uint8 => to.collect_seq(raw.iter()),
            DataType::Uint16 => to.collect_seq(elements(raw, u16::from_le_bytes)),
            DataType::Uint32 => to.collect_seq(elements(raw, u32::from_le_bytes)),
            DataType::Uint64 => to.collect_seq(elements(raw, u64::from_le_bytes)),
            DataType::Fp32 => to.collect_seq(elements(raw, f32::from_le_bytes)),
            DataType::Fp64 => to.collect_seq(elements(raw, f64::from_le_bytes)),
            DataType::Fp16 | DataType::Bf16 | DataType::Bytes => {
                Err(serde::ser::Error::custom("the datatype has no JSON form"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(json: &str, datatype: DataType, shape: &[i64]) -> Result<Vec<u8>, String> {
        let raw: &RawValue = serde_json::from_str(json).unwrap();
        read(raw, datatype, shape)
    }

    #[test]
    fn flat_and_nested_data_are_read_alike() {
        let expected = Ok(vec![1, 2, 3, 4, 5, 6]);
        for json in ["[1,2,3,4,5,6]", "[[1,2,3],[4,5,6]]", " [ [ 1 , 2,3 ]\n,[4,\t5,6 ] ] "] {
            assert_eq!(parse(json, DataType::Uint8, &[2, 3]), expected, "{json}");
        }
        assert_eq!(parse("[[[1],[2]]]", DataType::Int8, &[1, 2, 1]), Ok(vec![1, 2]));
        assert_eq!(parse("[7]", DataType::Uint8, &[]), Ok(vec![7]));
        assert_eq!(parse("7", DataType::Uint8, &[]), Ok(vec![7]));
        assert_eq!(parse("[true, false]", DataType::Bool, &[2]), Ok(vec![1, 0]));
    }

    #[test]
    fn wrong_shapes_wrong_counts_and_wrong_elements_are_refused() {
        for (json, datatype, shape) in [
            ("[[1,2],[3,4],[5,6]]", DataType::Uint8, [2, 3].as_slice()),
            ("[[1,2,3,4,5,6]]", DataType::Uint8, &[2, 3]),
            ("[[1,2,3],4,5,6]", DataType::Uint8, &[2, 3]),
            ("[1,2,3,[4,5,6]]", DataType::Uint8, &[2, 3]),
            ("[[[1,2,3],[4,5,6]]]", DataType::Uint8, &[2, 3]),
            ("[1,2,3,4,5]", DataType::Uint8, &[2, 3]),
            ("[1,2,3,4,5,6,7]", DataType::Uint8, &[2, 3]),
            ("[]", DataType::Uint8, &[1]),
            ("1", DataType::Uint8, &[2]),
            ("[256]", DataType::Uint8, &[1]),
            ("[-1]", DataType::Uint64, &[1]),
            ("[1.5]", DataType::Int32, &[1]),
            ("[1e40]", DataType::Fp32, &[1]),
            ("[true]", DataType::Fp32, &[1]),
            ("[1]", DataType::Bool, &[1]),
            ("[null]", DataType::Fp32, &[1]),
            (r#"["1"]"#, DataType::Fp32, &[1]),
            (r#"[{"a":1}]"#, DataType::Fp32, &[1]),
            (r#""text""#, DataType::Fp32, &[1]),
            ("[1]", DataType::Fp16, &[1]),
            ("[1]", DataType::Fp32, &[1 << 40, 1, 8, 8]),
            ("[1]", DataType::Fp32, &[i64::MAX, i64::MAX]),
        ] {
            assert!(parse(json, datatype, shape).is_err(), "{json} as {datatype} of {shape:?}");
        }
    }

    #[test]
    fn extreme_values_are_read_exactly() {
        assert_eq!(
            parse("[18446744073709551615]", DataType::Uint64, &[1]),
            Ok(u64::MAX.to_le_bytes().to_vec())
        );
        let least = i64::MIN.to_string();
        assert_eq!(parse(&format!("[{least}]"), DataType::Int64, &[1]), Ok(i64::MIN.to_le_bytes().to_vec()));
        assert_eq!(parse("[-0.0]", DataType::Fp32, &[1]), Ok((-0.0f32).to_le_bytes().to_vec()));
    }

    proptest! {
        #[test]
        fn every_finite_number_survives_json(numbers in proptest::collection::vec(proptest::num::f64::NORMAL | proptest::num::f64::SUBNORMAL | proptest::num::f64::ZERO, 1..20)) {
            let data: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            let shape = vec![numbers.len() as i64];
            let tensor = NamedTensor { name: "x".into(), datatype: DataType::Fp64, shape: shape.clone(), data: data.clone().into() };
            prop_assert!(is_finite(&tensor));
            let json = serde_json::to_string(&FlatJsonArray(&tensor)).unwrap();
            prop_assert_eq!(parse(&json, DataType::Fp64, &shape), Ok(data));
        }
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            ".{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(5, 64, 6, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
                proptest::collection::btree_map(".{0,4}", inner, 0..3)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Any data makes the right number of bytes, or an error.
        #[test]
        fn any_json_is_read_whole_or_refused(
            json in json(),
            shape in proptest::collection::vec(dimension(), 0..4),
            datatype in proptest::sample::select(DataType::ALL.to_vec()),
        ) {
            let json = json.to_string();
            if let Ok(raw) = parse(&json, datatype, &shape) {
                let count = element_count(&shape).unwrap();
                prop_assert_eq!(raw.len(), count * datatype.size().unwrap());
                prop_assert!(raw.capacity() <= (json.len() / 2 + 1) * 8);
            }
        }

        /// A shape that the data does not fill is refused, for any claimed size.
        #[test]
        fn a_shape_beyond_the_data_is_refused(
            elements in 1usize..50,
            shape in proptest::collection::vec(dimension(), 1..4),
        ) {
            let json = format!("[{}0]", "0,".repeat(elements - 1));
            let fits = element_count(&shape) == Some(elements);
            prop_assert_eq!(parse(&json, DataType::Fp64, &shape).is_ok(), fits);
        }
    }

    /// Returns small dimensions, which sometimes fit the sent data, and all other dimensions.
    fn dimension() -> impl Strategy<Value = i64> {
        prop_oneof![1i64..5, 1..=i64::MAX, Just(1 << 40), Just(i64::MAX)]
    }

    #[test]
    fn nan_and_infinity_are_detected() {
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let data = [1.0f32.to_le_bytes(), x.to_le_bytes()].concat().into();
            assert!(!is_finite(&NamedTensor {
                name: "x".into(),
                datatype: DataType::Fp32,
                shape: vec![2],
                data
            }));
        }
    }
}
