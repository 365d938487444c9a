//! Checks a file's protobuf framing before decoding. Distinguishes a file that was cut short from a
//! file that is not ONNX. Bounds the number of messages, the depth of their nesting and the memory of
//! the decoded model. A two-byte message decodes to hundreds of bytes, so without these bounds a
//! small file could claim a large part of memory.

use crate::error::ModelError;
use crate::onnx::{
    AttributeProto, GraphProto, ModelProto, NodeProto, SequenceType, SparseTensorProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TensorType, TypeProto, ValueInfoProto,
};

/// Most messages of a model; a large transformer has about 50,000.
pub const MAX_MESSAGES: usize = 1 << 20;
/// Deepest nesting of messages; a subgraph within a subgraph adds three levels.
pub const MAX_NESTING: usize = 48;
/// Most fields of a model: a repeated string of two bytes decodes to 24 bytes.
const MAX_FIELDS: usize = 8 * MAX_MESSAGES;
/// Most bytes of decoded memory for each byte of the file, in addition to the file itself.
const MEMORY_RATIO_MAX: u64 = 3;
/// Most bytes of decoded memory beyond [`MEMORY_RATIO_MAX`].
const MEMORY_MARGIN_BYTES: u64 = 32 << 20;
/// Slots that a list may use per element: a `Vec` starts with four, and has its old and new slots
/// while it grows.
const PLACES: u64 = 4;
/// Header and rounding of an allocation, in bytes.
const ALLOCATION_BYTES: u64 = 16;
/// Bytes of a number in an unpacked list, including room to grow.
const NUMBER_BYTES: u64 = 32;

/// The ONNX messages that contain messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WireKind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    SparseTensor,
    ValueInfo,
    Type,
    TensorType,
    SequenceType,
    Shape,
    /// A message that contains no further message.
    Leaf,
}

impl WireKind {
    /// Returns the kind of the message in length-delimited field `field`. Returns `None` for text,
    /// bytes, packed numbers and fields that decoding skips.
    fn child(self, field: u64) -> Option<Self> {
        match (self, field) {
            (Self::Model, 7) | (Self::Attribute, 6) => Some(Self::Graph),
            (Self::Model, 8) | (Self::Tensor, 13) | (Self::Shape, 1) => Some(Self::Leaf),
            (Self::Graph, 1) => Some(Self::Node),
            (Self::Graph, 5) | (Self::Attribute, 5) | (Self::SparseTensor, 1) => Some(Self::Tensor),
            (Self::Graph, 11 | 12) => Some(Self::ValueInfo),
            (Self::Graph, 15) => Some(Self::SparseTensor),
            (Self::Node, 5) => Some(Self::Attribute),
            (Self::ValueInfo, 2) | (Self::SequenceType, 1) => Some(Self::Type),
            (Self::Type, 1) => Some(Self::TensorType),
            (Self::Type, 4) => Some(Self::SequenceType),
            (Self::TensorType, 2) => Some(Self::Shape),
            _ => None,
        }
    }

    /// Returns the size of the struct for such a message.
    const fn bytes(self) -> u64 {
        let bytes = match self {
            Self::Model => size_of::<ModelProto>(),
            Self::Graph => size_of::<GraphProto>(),
            Self::Node => size_of::<NodeProto>(),
            Self::Attribute => size_of::<AttributeProto>(),
            Self::Tensor => size_of::<TensorProto>(),
            Self::SparseTensor => size_of::<SparseTensorProto>(),
            Self::ValueInfo => size_of::<ValueInfoProto>(),
            Self::Type => size_of::<TypeProto>(),
            Self::TensorType => size_of::<TensorType>(),
            Self::SequenceType => size_of::<SequenceType>(),
            Self::Shape => size_of::<TensorShapeProto>(),
            Self::Leaf => size_of::<StringStringEntryProto>(),
        };
        bytes as u64
    }

    /// Returns the memory of a length-delimited field: the slot of its message or text, and its text
    /// or numbers.
    fn memory(self, field: u64, body: &[u8]) -> u64 {
        let numbers = |count: usize, bytes: u64| count as u64 * bytes * (PLACES - 1) + NUMBER_BYTES;
        let varints = || body.iter().filter(|&&byte| byte < 0x80).count();
        let text = body.len() as u64 + ALLOCATION_BYTES;
        match (self, field) {
            (Self::Attribute, 5 | 6) | (Self::SequenceType | Self::Type, _) => {
                self.child(field).map_or(0, |child| child.bytes() + ALLOCATION_BYTES)
            }
            (Self::Tensor, 1 | 7) | (Self::Attribute, 8) => numbers(varints(), 8),
            (Self::Tensor, 5) => numbers(varints(), 4),
            (Self::Tensor, 4) | (Self::Attribute, 7) => numbers(body.len() / 4, 4),
            (Self::Tensor, 10) => numbers(body.len() / 8, 8),
            // Fields of bytes share the file's buffer, so they need no memory.
            (Self::Tensor, 9) | (Self::Attribute, 4) => 0,
            (Self::Node, 1 | 2) => text + PLACES * size_of::<String>() as u64,
            (Self::Attribute, 9) => PLACES * size_of::<bytes::Bytes>() as u64,
            _ => self.child(field).map_or(text, |child| child.bytes() * PLACES),
        }
    }
}

/// Reason why bytes are not a sequence of protobuf fields.
enum FramingFault {
    /// A field is longer than the message around it, by this many bytes.
    Overrun(u64),
    /// A field number or wire type does not exist in protobuf.
    NotAField,
}

/// Checks the framing of a whole file.
///
/// # Errors
/// Returns [`ModelError::NotOnnx`], [`ModelError::Truncated`], [`ModelError::TooMany`] or
/// [`ModelError::TooDeep`].
pub(crate) fn check(file: &[u8]) -> Result<(), ModelError> {
    if file.is_empty() {
        return Err(ModelError::NotOnnx { reason: "the file is empty".into() });
    }
    if file.starts_with(b"version https://git-lfs") {
        return Err(ModelError::NotOnnx { reason: "it is a Git LFS pointer: run git lfs pull".into() });
    }
    // ONNX writers write the fields in order. The first field is ir_version, number 1, a varint.
    if file[0] != 0x08 {
        return Err(ModelError::NotOnnx { reason: "it does not begin like an ONNX model".into() });
    }
    let memory_max = (file.len() as u64).saturating_mul(MEMORY_RATIO_MAX).saturating_add(MEMORY_MARGIN_BYTES);
    FramingCheck { fields: 0, messages: 0, memory: 0, memory_max }.message(WireKind::Model, file, 0)
}

/// Whether a message has at most `fields_max` fields, and each message in it at most `inner_max`.
pub(crate) fn has_at_most(fields_max: usize, inner_max: usize, mut message: &[u8]) -> bool {
    let mut fields = 0;
    while !message.is_empty() {
        fields += 1;
        let Ok((_, body)) = next_field(&mut message) else { return false };
        let fits = inner_max == 0 || body.is_none_or(|body| has_at_most(inner_max, 0, body));
        if fields > fields_max || !fits {
            return false;
        }
    }
    true
}

struct FramingCheck {
    fields: usize,
    messages: usize,
    memory: u64,
    memory_max: u64,
}

impl FramingCheck {
    fn message(&mut self, kind: WireKind, mut rest: &[u8], depth: usize) -> Result<(), ModelError> {
        if depth > MAX_NESTING {
            return Err(ModelError::TooDeep { what: "messages nested in each other", limit: MAX_NESTING });
        }
        self.messages += 1;
        if self.messages > MAX_MESSAGES {
            return Err(ModelError::TooMany { what: "protobuf messages", limit: MAX_MESSAGES });
        }
        while !rest.is_empty() {
            self.fields += 1;
            if self.fields > MAX_FIELDS {
                return Err(ModelError::TooMany { what: "protobuf fields", limit: MAX_FIELDS });
            }
            let (field, body) = next_field(&mut rest).map_err(|flaw| describe(&flaw, depth))?;
            self.memory += body.map_or(NUMBER_BYTES, |body| kind.memory(field, body));
            if self.memory > self.memory_max {
                let limit = usize::try_from(self.memory_max).unwrap_or(usize::MAX);
                return Err(ModelError::TooMany { what: "bytes of memory for its structure", limit });
            }
            if let (Some(child), Some(body)) = (kind.child(field), body) {
                self.message(child, body, depth + 1)?;
            }
        }
        Ok(())
    }
}

/// Converts a flaw into an error. A field that exceeds the file itself was cut off; any other flaw is damage.
fn describe(flaw: &FramingFault, depth: usize) -> ModelError {
    match flaw {
        FramingFault::Overrun(missing) if depth == 0 => ModelError::Truncated { missing: *missing },
        FramingFault::Overrun(_) => {
            ModelError::NotOnnx { reason: "a field is longer than the message around it".into() }
        }
        FramingFault::NotAField => ModelError::NotOnnx { reason: "its bytes are not protobuf fields".into() },
    }
}

/// Removes the first field, and returns its number, and its bytes if the field is length-delimited.
fn next_field<'a>(rest: &mut &'a [u8]) -> Result<(u64, Option<&'a [u8]>), FramingFault> {
    let tag = varint(rest)?;
    let field = tag >> 3;
    if field == 0 || tag > u64::from(u32::MAX) {
        return Err(FramingFault::NotAField);
    }
    match tag & 7 {
        0 => varint(rest).map(|_| (field, None)),
        1 => take(rest, 8).map(|_| (field, None)),
        2 => {
            let length = varint(rest)?;
            take(rest, length).map(|body| (field, Some(body)))
        }
        5 => take(rest, 4).map(|_| (field, None)),
        // Groups, which ONNX does not use, and wire types that protobuf does not define.
        _ => Err(FramingFault::NotAField),
    }
}

fn take<'a>(rest: &mut &'a [u8], length: u64) -> Result<&'a [u8], FramingFault> {
    let available = rest.len() as u64;
    match usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length)) {
        Some((body, after)) => {
            *rest = after;
            Ok(body)
        }
        None => Err(FramingFault::Overrun(length.saturating_sub(available))),
    }
}

fn varint(rest: &mut &[u8]) -> Result<u64, FramingFault> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let &[byte] = take(rest, 1)? else { return Err(FramingFault::NotAField) };
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(FramingFault::NotAField)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_is(file: &[u8], says: &str) {
        let message = check(file).map_or_else(|e| e.to_string(), |()| "fine".into());
        assert!(message.contains(says), "{file:?}: {message}");
    }

    #[test]
    fn truncated_files_are_distinguished_from_files_that_are_not_onnx() {
        check_is(b"", "the file is empty");
        check_is(b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull");
        check_is(b"\x89PNG\r\n", "does not begin like an ONNX model");
        check_is(&[0x08, 9], "fine");
        check_is(&[0x08, 9, 0x3a, 4, 0, 0], "2 bytes");
        check_is(&[0x08, 9, 0x3a, 3, 0x0a, 9, 0], "longer than the message around it");
        check_is(&[0x08, 9, 0x3b], "not protobuf fields");
        check_is(
            &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
            "not protobuf fields",
        );
    }

    #[test]
    fn messages_and_memory_are_bounded_before_decoding() {
        let graph = |fields: Vec<u8>| {
            let mut file = vec![0x08, 9, 0x3a];
            prost::encoding::encode_varint(fields.len() as u64, &mut file);
            file.extend(fields);
            check(&file)
        };
        // The first graph has nodes without fields; the second has one-byte elements that decode to
        // eight bytes.
        let nodes = graph([0x0a, 0x00].repeat(MAX_MESSAGES + 1));
        assert!(matches!(nodes, Err(ModelError::TooMany { .. })), "{nodes:?}");
        let numbers =
            [&[0x2a, 0x85, 0x80, 0x80, 0x02, 0x3a, 0x80, 0x80, 0x80, 0x02][..], &[1; 4 << 20]].concat();
        let numbers = graph(numbers);
        let what = "bytes of memory for its structure";
        assert!(
            matches!(numbers, Err(ModelError::TooMany { what: found, .. }) if found == what),
            "{numbers:?}"
        );
        assert!(graph([0x0a, 0x00].repeat(10_000)).is_ok());
    }

    #[test]
    fn too_deep_nesting_is_refused() {
        let mut inner = Vec::new();
        for _ in 0..MAX_NESTING {
            // Tags of graph -> node -> attribute -> graph.
            for tag in [0x32u8, 0x2a, 0x0a] {
                let mut outer = vec![tag];
                prost::encoding::encode_varint(inner.len() as u64, &mut outer);
                outer.extend(inner);
                inner = outer;
            }
        }
        let mut file = vec![0x08, 9, 0x3a];
        prost::encoding::encode_varint(inner.len() as u64, &mut file);
        file.extend(inner);
        assert!(matches!(check(&file), Err(ModelError::TooDeep { .. })));
    }
}
