//! Field masks (`google.protobuf.FieldMask`): which fields of an answer are wanted, or which of a request
//! are meant. Paths are checked against the descriptors that reflection shows; one that names no field
//! is refused by name.
//!
//! An answer is cut on its encoded form, field by field, so that no message needs code of its own. A path
//! through a list goes into each of it; a map is taken whole.

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

/// Paths of one mask.
const PATHS_MAX: usize = 100;

/// Every message by its full name, such as `.millrace.admin.v1.Function`.
fn messages() -> &'static BTreeMap<String, DescriptorProto> {
    static MESSAGES: OnceLock<BTreeMap<String, DescriptorProto>> = OnceLock::new();
    MESSAGES.get_or_init(|| {
        // What this build compiled in is well formed; if it were not, every path would be unknown.
        let files = FileDescriptorSet::decode(millrace_proto::DESCRIPTORS).unwrap_or_default().file;
        let named = files.into_iter().flat_map(|file| {
            let package = file.package().to_owned();
            file.message_type.into_iter().map(move |it| (format!(".{package}.{}", it.name()), it))
        });
        named.collect()
    })
}

/// The fields that are wanted of a message, by number; of a message among them, some or all.
#[derive(Debug, Clone, PartialEq)]
enum Wanted {
    All,
    Some(BTreeMap<u32, Wanted>),
}

/// What is wanted of every answer of a kind.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Mask(Wanted);

impl Mask {
    /// Reads a mask over a message of `millrace.admin.v1`. None, or one without paths, wants all.
    ///
    /// # Errors
    /// `MALFORMED_REQUEST` names the path that names no field.
    pub(super) fn read(mask: Option<FieldMask>, message: &str) -> Result<Self, Failure> {
        let paths = mask.map(|mask| mask.paths).unwrap_or_default();
        if paths.len() > PATHS_MAX {
            return Err(Failure::malformed(format!(
                "the mask has {} paths: at most {PATHS_MAX}",
                paths.len()
            )));
        }
        if paths.is_empty() || paths == ["*"] {
            return Ok(Self(Wanted::All));
        }
        let root = format!(".millrace.admin.v1.{message}");
        let mut wanted = Wanted::Some(BTreeMap::new());
        for path in &paths {
            add(&mut wanted, &root, path).ok_or_else(|| {
                Failure::malformed(format!("the mask's path {path:?} names no field of {message}"))
            })?;
        }
        Ok(Self(wanted))
    }

    /// The wanted part of an answer.
    pub(super) fn cut<M: Message + Default>(&self, message: M) -> M {
        let Wanted::Some(fields) = &self.0 else { return message };
        // A message's own encoding can be read, in parts too.
        cut(&message.encode_to_vec(), fields)
            .and_then(|bytes| M::decode(bytes.as_slice()).ok())
            .unwrap_or(message)
    }
}

/// Adds a path below a message. `None` where it names no field.
fn add(wanted: &mut Wanted, message: &str, path: &str) -> Option<()> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let of = messages().get(message)?;
    let field = of.field.iter().find(|field| field.name() == name)?;
    let number = u32::try_from(field.number()).ok()?;
    let Some(rest) = rest else {
        if let Wanted::Some(fields) = wanted {
            fields.insert(number, Wanted::All);
        }
        return Some(());
    };
    // A map's entries are messages of no name of their own.
    let below = (field.r#type() == Type::Message).then(|| field.type_name())?;
    messages().get(below)?;
    let mut nothing = Wanted::Some(BTreeMap::new());
    let inner = match wanted {
        Wanted::Some(fields) => fields.entry(number).or_insert_with(|| Wanted::Some(BTreeMap::new())),
        Wanted::All => &mut nothing,
    };
    add(inner, below, rest)
}

/// The wanted fields of an encoded message.
fn cut(mut bytes: &[u8], wanted: &BTreeMap<u32, Wanted>) -> Option<Vec<u8>> {
    let mut left = Vec::with_capacity(bytes.len());
    while bytes.has_remaining() {
        let from = bytes;
        let (number, kind) = decode_key(&mut bytes).ok()?;
        match (wanted.get(&number), kind) {
            (Some(Wanted::Some(fields)), WireType::LengthDelimited) => {
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

/// The fields of a flat message that an update means, of those it has. No mask means all.
///
/// # Errors
/// `MALFORMED_REQUEST` names the path that names none of them.
pub(super) fn updated<'a>(mask: Option<FieldMask>, known: &[&'a str]) -> Result<Vec<&'a str>, Failure> {
    let paths = mask.map(|mask| mask.paths).unwrap_or_default();
    if paths.is_empty() || paths == ["*"] {
        return Ok(known.to_vec());
    }
    let field = |path: &String| {
        let found = known.iter().copied().find(|name| name == path);
        found.ok_or_else(|| {
            Failure::malformed(format!(
                "the mask's path {path:?} names no field: there are {}",
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
    fn an_answer_has_the_fields_that_are_wanted_and_no_more() {
        let cut = |paths: &[&str]| Mask::read(mask(paths), "Node").unwrap().cut(node());
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
        assert_eq!(cut(&["gpus.index", "gpus"]), whole, "all of it is more than a part");
        assert_eq!(cut(&["gpus", "gpus.index"]), whole);
    }

    #[test]
    fn a_path_that_names_no_field_is_refused_by_name() {
        for path in ["nam", "name.x", "gpus.x", "gpus.models.functions.x", "", "gpus.", "host_models.0"] {
            let refused = Mask::read(mask(&["name", path]), "Node").unwrap_err();
            assert!(refused.message.contains(&format!("{path:?}")), "{}", refused.message);
        }
        assert!(Mask::read(mask(&["spec.labels"]), "Function").is_ok());
        assert!(Mask::read(mask(&["spec.labels.x"]), "Function").is_err(), "a map is taken whole");
        let many: Vec<_> = (0..=PATHS_MAX).map(|_| "name").collect();
        assert!(Mask::read(mask(&many), "Node").is_err());
    }

    #[test]
    fn an_update_means_what_its_mask_names() {
        let known = ["dispatch", "eviction"];
        assert_eq!(updated(None, &known).unwrap(), known);
        assert_eq!(updated(mask(&["eviction"]), &known).unwrap(), ["eviction"]);
        let refused = updated(mask(&["evict"]), &known).unwrap_err().message;
        assert!(refused.contains("\"evict\"") && refused.contains("dispatch, eviction"), "{refused}");
    }
}
