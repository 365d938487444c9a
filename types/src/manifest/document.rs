//! Parsing of a single YAML document. The fields that `spec` may have depend on `kind`.

use std::fmt;

use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::error::{ManifestError, ManifestSubject, SourcePosition};
use super::field::Metadata;
use super::function::{FunctionManifest, FunctionText};
use super::kind::{API_VERSION, LIST, ManifestKind};
use super::policy::PolicyText;
use super::tenant::{TenantManifest, TenantText};
use super::workflow::WorkflowText;
use crate::policy::PolicySpec;
use crate::workflow::WorkflowSpec;

/// A checked document of a manifest.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
pub enum Manifest {
    /// The declaration of a function.
    Function(FunctionManifest),
    /// The declaration of a workflow.
    Workflow(WorkflowSpec),
    /// The caps on a tenant.
    Tenant(TenantManifest),
    /// The scheduling policy of the cluster.
    Policy(PolicySpec),
}

impl Manifest {
    /// Returns the function, if the document declares one.
    #[must_use]
    pub fn function(self) -> Option<FunctionManifest> {
        match self {
            Self::Function(function) => Some(function),
            Self::Workflow(_) | Self::Tenant(_) | Self::Policy(_) => None,
        }
    }

    pub(super) fn subject(&self) -> ManifestSubject {
        match self {
            Self::Function(function) => ManifestSubject::Model(function.spec.key.clone()),
            Self::Workflow(workflow) => ManifestSubject::Model(workflow.key.clone()),
            Self::Tenant(tenant) => ManifestSubject::Tenant(tenant.name.clone()),
            Self::Policy(_) => ManifestSubject::Policy,
        }
    }
}

pub(super) struct Document {
    api_version: String,
    kind: String,
    content: DocumentContent,
}

enum DocumentContent {
    One(Box<(Metadata, DocumentSpec)>),
    List(Vec<Document>),
}

/// The parsed `spec` of a document, by kind.
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
enum DocumentSpec {
    Function(FunctionText),
    Workflow(WorkflowText),
    Tenant(TenantText),
    Policy(PolicyText),
    /// The spec of an unknown kind, which was skipped.
    Unknown,
}

impl DocumentSpec {
    /// Parses the value of `spec` for a kind.
    fn read<'de, A: MapAccess<'de>>(kind: Option<ManifestKind>, map: &mut A) -> Result<Self, A::Error> {
        Ok(match kind {
            Some(ManifestKind::Function) => Self::Function(map.next_value()?),
            Some(ManifestKind::Workflow) => Self::Workflow(map.next_value()?),
            Some(ManifestKind::Tenant) => Self::Tenant(map.next_value()?),
            Some(ManifestKind::Policy) => Self::Policy(map.next_value()?),
            None => {
                map.next_value::<IgnoredAny>()?;
                Self::Unknown
            }
        })
    }
}

impl Document {
    /// Returns the document itself or, for a list, the list's items.
    pub(super) fn items(self, at: SourcePosition) -> Result<Vec<(SourcePosition, Self)>, ManifestError> {
        self.check_version(at)?;
        match self.content {
            DocumentContent::One(_) => Ok(vec![(at, self)]),
            DocumentContent::List(items) => {
                let item = |(number, item)| (SourcePosition { item: Some(number), ..at }, item);
                Ok((1..).zip(items).map(item).collect())
            }
        }
    }

    pub(super) fn check(self, at: SourcePosition) -> Result<Manifest, ManifestError> {
        self.check_version(at)?;
        let kind = ManifestKind::named(&self.kind);
        let DocumentContent::One(one) = self.content else {
            let problem = "is a list in a list: write its items here".to_owned();
            return Err(ManifestError::Field { at, kind, field: "items", problem });
        };
        let (metadata, body) = *one;
        let checked = match body {
            DocumentSpec::Function(spec) => spec.check(metadata).map(Manifest::Function),
            DocumentSpec::Workflow(spec) => spec.check(metadata).map(Manifest::Workflow),
            DocumentSpec::Tenant(spec) => spec.check(&metadata).map(Manifest::Tenant),
            DocumentSpec::Policy(spec) => spec.check(&metadata).map(Manifest::Policy),
            DocumentSpec::Unknown => return Err(ManifestError::Kind { at, found: self.kind }),
        };
        checked.map_err(|(field, problem)| ManifestError::Field { at, kind, field, problem })
    }

    fn check_version(&self, at: SourcePosition) -> Result<(), ManifestError> {
        if self.api_version == API_VERSION {
            return Ok(());
        }
        Err(ManifestError::ApiVersion { at, found: self.api_version.clone() })
    }
}

/// Guesses the kind of the document or item around a line (counted from 1) of a file that could not
/// be parsed. The guess relies on `kind` standing before the fields that depend on the kind.
pub(super) fn kind_at(text: &str, line: u64) -> Option<ManifestKind> {
    let until = usize::try_from(line).unwrap_or(usize::MAX);
    let lines: Vec<&str> = text.lines().take(until).collect();
    let ends = |line: &&str| line.starts_with("---");
    let mut document = lines.into_iter().rev().skip_while(ends).take_while(|line| !ends(line));
    let kind_of = |line: &str| {
        let (_, rest) = line.split_once("kind: ")?;
        let end = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        ManifestKind::named(&rest[..end])
    };
    document.find_map(kind_of)
}

/// Written by hand because the fields of `spec` depend on `kind`. Parsing `spec` twice instead
/// would lose the positions of errors in the file.
impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(DocumentVisitor)
    }
}

struct DocumentVisitor;

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a document with apiVersion, kind, metadata and spec")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
        const FIELDS: &[&str] = &["apiVersion", "kind", "metadata", "spec", "status", "items"];
        let mut api_version = None::<String>;
        let mut kind = None::<String>;
        let mut metadata = None;
        let mut body = None;
        let mut items = None;
        while let Some(key) = map.next_key::<String>()? {
            match (key.as_str(), kind.as_deref()) {
                ("apiVersion", _) => api_version = Some(map.next_value()?),
                ("kind", _) => kind = Some(map.next_value()?),
                ("spec" | "items", None) => {
                    let problem = format!("kind is missing before {key}: write it first");
                    return Err(A::Error::custom(problem));
                }
                ("items", Some(LIST)) => items = Some(map.next_value()?),
                ("metadata", _) => metadata = Some(map.next_value()?),
                ("spec", Some(word)) if word != LIST => {
                    body = Some(DocumentSpec::read(ManifestKind::named(word), &mut map)?)
                }
                // The server adds `status`, and printed documents may be applied again.
                ("status", _) => {
                    map.next_value::<IgnoredAny>()?;
                }
                (other, _) => return Err(A::Error::unknown_field(other, FIELDS)),
            }
        }
        let kind = kind.ok_or_else(|| A::Error::missing_field("kind"))?;
        let content = match items {
            Some(items) => DocumentContent::List(items),
            None if kind == LIST => return Err(A::Error::missing_field("items")),
            None => DocumentContent::One(Box::new((
                metadata.ok_or_else(|| A::Error::missing_field("metadata"))?,
                body.ok_or_else(|| A::Error::missing_field("spec"))?,
            ))),
        };
        let api_version = api_version.ok_or_else(|| A::Error::missing_field("apiVersion"))?;
        Ok(Document { api_version, kind, content })
    }
}
