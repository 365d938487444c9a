//! Field masks (`google.protobuf.FieldMask`): the requested fields of a response, or the fields of a
//! request to update. Paths are checked against the descriptors that reflection shows. A path without a
//! field is refused by name.
//!
//! An encoded response is cut field by field, so no message needs special code. A path through a list
//! applies to each element; a map is always taken whole.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use millrace_types::Failure;
use prost::Message;
use prost::bytes::{Buf as _, BufMut as _};
use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint, skip_field,
};
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FieldMask, FileDescriptorSet};

/// Paths of a mask.
const PATHS_MAX: usize = 100;

/// Returns every message by full name, such as `.millrace.admin.v1.Function`.
fn messages() -> &'static BTreeMap<String, DescriptorProto> {
    static MESSAGES: OnceLock<BTreeMap<String, DescriptorProto>> = OnceLock::new();
    MESSAGES.get_or_init(|| {
        // The compiled-in descriptors are well formed. Otherwise, every path would be unknown.
        let files = FileDescriptorSet::decode(millrace_proto::DESCRIPTORS).unwrap_or_default().file;
        let named = files.into_iter().flat_map(|file| {
            let package = file.package().to_owned();
            file.message_type.into_iter().map(move |it| (format!(".{package}.{}", it.name()), it))
        });
        named.collect()
    })
}

/// The requested fields of a message by number, each whole or in part.
#[derive(Debug, Clone, PartialEq)]
enum FieldSelection {
    All,
    Some(BTreeMap<u32, FieldSelection>),
}

/// The requested part of all responses of a kind.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ResponseMask(FieldSelection);

impl ResponseMask {
    /// Parses a mask over a message of `millrace.admin.v1`. No mask, or a mask without paths, selects
    /// everything.
    ///
    /// # Errors
    /// `MALFORMED_REQUEST` with the path that names no field.
    pub(super) fn read(mask: Option<FieldMask>, message: &str) -> Result<Self, Failure> {
        let paths = mask.map(|mask| mask.paths).unwrap_or_default();
        if paths.len() > PATHS_MAX {
            return Err(Failure::malformed(format!(
                "the mask has {} paths: at most {PATHS_MAX}",
                paths.len()
            )));
        }
        if paths.is_empty() || paths == ["*"] {
            return Ok(Self(FieldSelection::All));
        }
        let root = format!(".millrace.admin.v1.{message}");
        let mut wanted = FieldSelection::Some(BTreeMap::new());
        for path in &paths {
            add(&mut wanted, &root, path).ok_or_else(|| {
                Failure::malformed(format!("the mask's path {path:?} names no field of {message}"))
            })?;
        }
        Ok(Self(wanted))
    }

    /// Returns the requested part of a response.
    pub(super) fn cut<M: Message + Default>(&self, message: M) -> M {
        let FieldSelection::Some(fields) = &self.0 else { return message };
        // A message's own encoding always parses, in parts too.
        cut(&message.encode_to_vec(), fields)
            .and_then(|bytes| M::decode(bytes.as_slice()).ok())
            .unwrap_or(message)
    }
}

/// Adds a path below a message. Returns `None` if the path names no field.
fn add(wanted: &mut FieldSelection, message: &str, path: &str) -> Option<()> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let of = messages().get(message)?;
    let field = of.field.iter().find(|field| field.name() == name)?;
    let number = u32::try_from(field.number()).ok()?;
    let Some(rest) = rest else {
        if let FieldSelection::Some(fields) = wanted {
            fields.insert(number, FieldSelection::All);
        }
        return Some(());
    };
    // The entries of a map are messages without a name here, so the look-up fails.
    let below = (field.r#type() == Type::Message).then(|| field.type_name())?;
    messages().get(below)?;
    let mut nothing = FieldSelection::Some(BTreeMap::new());
    let inner = match wanted {
        FieldSelection::Some(fields) => {
            fields.entry(number).or_insert_with(|| FieldSelection::Some(BTreeMap::new()))
        }
        FieldSelection::All => &mut nothing,
    };
    add(inner, below, rest)
}

/// Returns the requested fields of an encoded message.
fn cut(mut bytes: &[u8], wanted: &BTreeMap<u32, FieldSelection>) -> Option<Vec<u8>> {
    let mut left = Vec::with_capacity(bytes.len());
    while bytes.has_remaining() {
        let from = bytes;
        let (number, kind) = decode_key(&mut bytes).ok()?;
        match (wanted.get(&number), kind) {
            (Some(FieldSelection::Some(fields)), WireType::LengthDelimited) => {
                let len = usize::try_from(decode_varint(&mut bytes).ok()?).ok()?;
                let inner = cut(bytes.get(..len)?, fields)?;
                bytes = &bytes[len..];
                encode_key(number, kind, &mut left);
                encode_varint(inner.len() as u64, &mut left);
                left.put_slice(&inner);
            }
            (keep, _) => {
                skip_field(kind, number, &mut bytes, DecodeContext::default()).ok()?;
                if keep.is_some() {
                    left.put_slice(&from[..from.len() - bytes.len()]);
                }
            }
        }
    }
    Some(left)
}

/// Returns the fields of a flat message that an update names, out of the `known` fields. No mask
/// selects all.
///
/// # Errors
/// `MALFORMED_REQUEST` with the path that names no known field.
pub(super) fn updated<'a>(mask: Option<FieldMask>, known: &[&'a str]) -> Result<Vec<&'a str>, Failure> {
    let paths = mask.map(|mask| mask.paths).unwrap_or_default();
    if paths.is_empty() || paths == ["*"] {
        return Ok(known.to_vec());
    }
    let field = |path: &String| {
        let found = known.iter().copied().find(|name| name == path);
        found.ok_or_else(|| {
            Failure::malformed(format!(
                "the mask's path {path:?} names no field: the fields are {}",
                known.join(", ")
            ))
        })
    };
    paths.iter().map(field).collect()
}

#[cfg(test)]
mod tests {
    use millrace_proto::admin as api;

    use super::*;

    fn mask(paths: &[&str]) -> Option<FieldMask> {
        Some(FieldMask { paths: paths.iter().map(|&path| path.to_owned()).collect() })
    }

    fn node() -> api::Node {
        let model =
            |digest: &str| api::ResidentModel { digest: digest.into(), bytes: 5, ..Default::default() };
        let gpu = |index| api::Gpu {
            index,
            health: "Up".into(),
            models: vec![model("a"), model("b")],
            ..Default::default()
        };
        api::Node {
            name: "n".into(),
            epoch: 3,
            gpus: vec![gpu(0), gpu(1)],
            host_models: vec!["a".into()],
            ..Default::default()
        }
    }

    #[test]
    fn a_response_has_only_the_requested_fields() {
        let cut = |paths: &[&str]| ResponseMask::read(mask(paths), "Node").unwrap().cut(node());
        assert_eq!(cut(&[]), node());
        assert_eq!(cut(&["*"]), node());
        let named = api::Node { name: "n".into(), host_models: vec!["a".into()], ..Default::default() };
        assert_eq!(cut(&["name", "host_models"]), named);
        let digests = api::Node {
            gpus: [0, 1]
                .map(|index| api::Gpu {
                    index,
                    models: ["a", "b"]
                        .map(|it| api::ResidentModel { digest: it.into(), ..Default::default() })
                        .into(),
                    ..Default::default()
                })
                .into(),
            ..Default::default()
        };
        assert_eq!(cut(&["gpus.index", "gpus.models.digest"]), digests);
        let whole = api::Node { gpus: node().gpus, ..Default::default() };
        assert_eq!(cut(&["gpus.index", "gpus"]), whole, "the whole field includes a part of it");
        assert_eq!(cut(&["gpus", "gpus.index"]), whole);
    }

    #[test]
    fn a_path_without_a_field_is_refused_by_name() {
        for path in ["nam", "name.x", "gpus.x", "gpus.models.functions.x", "", "gpus.", "host_models.0"] {
            let refused = ResponseMask::read(mask(&["name", path]), "Node").unwrap_err();
            assert!(refused.message.contains(&format!("{path:?}")), "{}", refused.message);
        }
        assert!(ResponseMask::read(mask(&["spec.labels"]), "Function").is_ok());
        assert!(ResponseMask::read(mask(&["spec.labels.x"]), "Function").is_err(), "a map is taken whole");
        let many: Vec<_> = (0..=PATHS_MAX).map(|_| "name").collect();
        assert!(ResponseMask::read(mask(&many), "Node").is_err());
    }

    #[test]
    fn an_update_changes_only_the_fields_of_its_mask() {
        let known = ["dispatch", "eviction"];
        assert_eq!(updated(None, &known).unwrap(), known);
        assert_eq!(updated(mask(&["eviction"]), &known).unwrap(), ["eviction"]);
        let refused = updated(mask(&["evict"]), &known).unwrap_err().message;
        assert!(refused.contains("\"evict\"") && refused.contains("dispatch, eviction"), "{refused}");
    }
}
