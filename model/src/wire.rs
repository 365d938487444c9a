//! A look over a file's protobuf framing before anything of it is decoded: tells a file that was
//! cut short from one that is no ONNX, and bounds how many messages decoding may build and how
//! deep they nest. A two-byte message decodes to hundreds of bytes, so a small file could
//! otherwise ask for a large part of memory.

use crate::error::ModelError;

/// Messages in one model; a large transformer has about 50,000.
pub const MAX_MESSAGES: usize = 1 << 20;
/// Messages nested in each other; a subgraph within a subgraph is three more.
pub const MAX_NESTING: usize = 48;
/// Fields in one model: a repeated string of two bytes decodes to 24.
const MAX_FIELDS: usize = 8 * MAX_MESSAGES;

/// The messages of ONNX that hold messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
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
    /// Holds no further message.
    Leaf,
}

impl Kind {
    /// What lies in length-delimited field `field`; `None` for text, bytes, packed numbers and what
    /// decoding skips.
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
}

/// Why a message's bytes are not fields.
enum Flaw {
    /// A field says it is this much longer than the message that holds it.
    Overrun(u64),
    /// A field number or wire type that protobuf does not have.
    NotAField,
}

/// Checks the framing of a whole file.
///
/// # Errors
/// [`ModelError::NotOnnx`], [`ModelError::Truncated`], [`ModelError::TooMany`] or
/// [`ModelError::TooDeep`].
pub(crate) fn check(file: &[u8]) -> Result<(), ModelError> {
    if file.is_empty() {
        return Err(ModelError::NotOnnx { reason: "the file is empty".into() });
    }
    if file.starts_with(b"version https://git-lfs") {
        return Err(ModelError::NotOnnx { reason: "it is a Git LFS pointer: run git lfs pull".into() });
    }
    // ONNX writers put fields in order: the first is ir_version, field 1, a number.
    if file[0] != 0x08 {
        return Err(ModelError::NotOnnx { reason: "it does not begin as an ONNX model does".into() });
    }
    Walk { fields: 0, messages: 0 }.message(Kind::Model, file, 0)
}

struct Walk {
    fields: usize,
    messages: usize,
}

impl Walk {
    fn message(&mut self, kind: Kind, mut rest: &[u8], depth: usize) -> Result<(), ModelError> {
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
            if let (Some(child), Some(body)) = (kind.child(field), body) {
                self.message(child, body, depth + 1)?;
            }
        }
        Ok(())
    }
}

/// A field that overruns the file itself was cut off; any other flaw is damage.
fn describe(flaw: &Flaw, depth: usize) -> ModelError {
    match flaw {
        Flaw::Overrun(missing) if depth == 0 => ModelError::Truncated { missing: *missing },
        Flaw::Overrun(_) => ModelError::NotOnnx { reason: "a field is longer than what holds it".into() },
        Flaw::NotAField => ModelError::NotOnnx { reason: "its bytes are no protobuf fields".into() },
    }
}

/// Takes one field off the front: its number, and its bytes where it is length-delimited.
fn next_field<'a>(rest: &mut &'a [u8]) -> Result<(u64, Option<&'a [u8]>), Flaw> {
    let tag = varint(rest)?;
    let field = tag >> 3;
    if field == 0 || tag > u64::from(u32::MAX) {
        return Err(Flaw::NotAField);
    }
    match tag & 7 {
        0 => varint(rest).map(|_| (field, None)),
        1 => take(rest, 8).map(|_| (field, None)),
        2 => {
            let length = varint(rest)?;
            take(rest, length).map(|body| (field, Some(body)))
        }
        5 => take(rest, 4).map(|_| (field, None)),
        // Groups, which ONNX has none of, and what protobuf does not define.
        _ => Err(Flaw::NotAField),
    }
}

fn take<'a>(rest: &mut &'a [u8], length: u64) -> Result<&'a [u8], Flaw> {
    let available = rest.len() as u64;
    match usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length)) {
        Some((body, after)) => {
            *rest = after;
            Ok(body)
        }
        None => Err(Flaw::Overrun(length.saturating_sub(available))),
    }
}

fn varint(rest: &mut &[u8]) -> Result<u64, Flaw> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let &[byte] = take(rest, 1)? else { return Err(Flaw::NotAField) };
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Flaw::NotAField)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_is(file: &[u8], says: &str) {
        let message = check(file).map_or_else(|e| e.to_string(), |()| "fine".into());
        assert!(message.contains(says), "{file:?}: {message}");
    }

    #[test]
    fn tells_cut_short_from_not_onnx() {
        check_is(b"", "the file is empty");
        check_is(b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull");
        check_is(b"\x89PNG\r\n", "does not begin as an ONNX model does");
        check_is(&[0x08, 9], "fine");
        check_is(&[0x08, 9, 0x3a, 4, 0, 0], "2 bytes");
        check_is(&[0x08, 9, 0x3a, 3, 0x0a, 9, 0], "longer than what holds it");
        check_is(&[0x08, 9, 0x3b], "no protobuf fields");
        check_is(
            &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
            "no protobuf fields",
        );
    }

    #[test]
    fn bounds_messages_before_decoding_them() {
        let nodes = [0x0a, 0x00].repeat(MAX_MESSAGES + 1);
        let mut file = vec![0x08, 9, 0x3a];
        prost::encoding::encode_varint(nodes.len() as u64, &mut file);
        file.extend(nodes);
        assert!(matches!(check(&file), Err(ModelError::TooMany { what: "protobuf messages", .. })));
    }

    #[test]
    fn bounds_nesting() {
        let mut inner = Vec::new();
        for _ in 0..MAX_NESTING {
            // graph -> node -> attribute -> graph
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
