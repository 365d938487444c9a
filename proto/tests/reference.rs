//! Test that `docs/guide/admin-api.md` matches the descriptors. After a change of the API, `BLESS=1 cargo
//! test -p millrace-proto --test reference` writes the page again.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use millrace_proto::DESCRIPTORS;
use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto};
use prost_types::{FileDescriptorSet, ServiceDescriptorProto};

const PACKAGE: &str = "millrace.admin.v1";
const REFERENCE: &str = "../docs/guide/admin-api.md";
const HEAD: &str = "\
# Admin API

`millrace.admin.v1.Admin` is served over gRPC at every controller's client port (8080). This page is generated \
from the descriptors that the server publishes by reflection, so a stock client needs no files:

```
grpcurl -plaintext localhost:8080 describe millrace.admin.v1.Admin
grpcurl -plaintext -d '{\"tenant\": \"default\"}' localhost:8080 millrace.admin.v1.Admin/ListFunctions
```

Every verb of `millrace` that reads or changes a cluster uses these methods; `invoke`, `load` and `health` mainly \
call the inference and health services. Any controller accepts each call and forwards writes to the leader.

- **Errors** carry a `google.rpc.ErrorInfo` whose reason is one of the names in \
[Reason](../../types/src/reason.rs), with `retryable` and `may_have_executed` in its metadata.
- **Writes** with an `idempotency_key` may be repeated. A write with a `resource_version` is refused as \
`CONFLICT` if another write came in between.
- **Lists** are paged: send `next_page_token` as `page_token` until the token is empty.
- **Masks**: `read_mask` names the fields of the response, `update_mask` the fields to change (in JSON a single \
text, with commas). A path that names no field is refused.
";

// Paths in a descriptor, with the numbers of descriptor.proto.
const FILE_MESSAGES: i32 = 4;
const FILE_ENUMS: i32 = 5;
const FILE_SERVICES: i32 = 6;
const MESSAGE_FIELDS: i32 = 2;
const ENUM_VALUES: i32 = 2;
const SERVICE_METHODS: i32 = 2;

/// The comments of a file, by the path of the commented item.
struct Comments<'a>(BTreeMap<&'a [i32], &'a str>);

impl<'a> Comments<'a> {
    fn of(file: &'a FileDescriptorProto) -> Self {
        let locations = file.source_code_info.as_ref().map_or(&[][..], |it| &it.location);
        let with = |it: &'a prost_types::source_code_info::Location| {
            Some((it.path.as_slice(), it.leading_comments.as_deref()?))
        };
        Self(locations.iter().filter_map(with).collect())
    }

    /// Returns a comment on a single line, as a table needs it.
    fn at(&self, path: &[i32]) -> String {
        let text = self.0.get(path).copied().unwrap_or_default();
        text.lines().map(str::trim).collect::<Vec<_>>().join(" ").trim().replace('|', "\\|")
    }
}

/// The contents of the page: the services of the package, and all messages and enums that they
/// refer to.
#[derive(Default)]
struct Page {
    methods: Vec<String>,
    /// Sections by type name without the package; the names are unique here.
    types: BTreeMap<String, String>,
    /// Full names of types that are still to be described.
    wanted: BTreeSet<String>,
}

fn index(number: usize) -> i32 {
    i32::try_from(number).unwrap()
}

fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap()
}

fn link(full: &str) -> String {
    let name = short(full);
    match full.trim_start_matches('.').starts_with("google.") {
        true => format!("`{}`", full.trim_start_matches('.')),
        false => format!("[{name}](#{})", name.to_lowercase()),
    }
}

impl Page {
    fn service(&mut self, service: &ServiceDescriptorProto, path: [i32; 2], comments: &Comments<'_>) {
        for (at, method) in service.method.iter().enumerate() {
            let stream = |streams: Option<bool>| if streams.unwrap_or(false) { "stream of " } else { "" };
            let about = comments.at(&[path[0], path[1], SERVICE_METHODS, index(at)]);
            let input = method.input_type();
            let output = method.output_type();
            self.methods.push(format!(
                "| `{}` | {}{} | {}{} | {about} |",
                method.name(),
                stream(method.client_streaming),
                link(input),
                stream(method.server_streaming),
                link(output)
            ));
            self.wanted.extend([input.to_owned(), output.to_owned()]);
        }
    }

    fn message(&mut self, full: &str, message: &DescriptorProto, path: &[i32], comments: &Comments<'_>) {
        let mut text = heading(short(full), &comments.at(path));
        if !message.field.is_empty() {
            text += "\n| | field | type | |\n|---|---|---|---|\n";
        }
        for (at, field) in message.field.iter().enumerate() {
            let about = comments.at(&[path, &[MESSAGE_FIELDS, index(at)]].concat());
            let type_ = self.field_type(message, field);
            text += &format!("| {} | `{}` | {type_} | {about} |\n", field.number(), field.name());
        }
        self.types.insert(short(full).to_owned(), text);
    }

    fn field_type(&mut self, message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
        let entry = message.nested_type.iter().find(|it| it.name() == short(field.type_name()));
        if let Some(entry) = entry {
            // A map is a list of a message type nested in this message.
            let of = |at: usize| entry.field[at].clone();
            let key = self.field_type(message, &of(0));
            let value = self.field_type(message, &of(1));
            return format!("map of {key} to {value}");
        }
        let one = match field.r#type() {
            Type::Message | Type::Enum => {
                self.wanted.insert(field.type_name().to_owned());
                link(field.type_name())
            }
            scalar => format!("`{}`", scalar.as_str_name().trim_start_matches("TYPE_").to_lowercase()),
        };
        match field.label() {
            Label::Repeated => format!("list of {one}"),
            _ if field.proto3_optional() => format!("{one}, optional"),
            _ if field.oneof_index.is_some() => format!("{one}, one of a oneof"),
            _ => one,
        }
    }

    fn enumeration(
        &mut self,
        full: &str,
        enumeration: &EnumDescriptorProto,
        path: &[i32],
        comments: &Comments<'_>,
    ) {
        let mut text = heading(short(full), &comments.at(path));
        text += "\n| | value | |\n|---|---|---|\n";
        for (at, value) in enumeration.value.iter().enumerate() {
            let about = comments.at(&[path, &[ENUM_VALUES, index(at)]].concat());
            text += &format!("| {} | `{}` | {about} |\n", value.number(), value.name());
        }
        self.types.insert(short(full).to_owned(), text);
    }
}

fn heading(name: &str, about: &str) -> String {
    let about = if about.is_empty() { String::new() } else { format!("\n{about}\n") };
    format!("\n### {name}\n{about}")
}

fn page(files: &[FileDescriptorProto]) -> String {
    let mut page = Page::default();
    for file in files.iter().filter(|file| file.package() == PACKAGE) {
        let comments = Comments::of(file);
        for (at, service) in file.service.iter().enumerate() {
            page.service(service, [FILE_SERVICES, index(at)], &comments);
        }
    }
    let mut done = BTreeSet::new();
    while let Some(full) = page.wanted.pop_first() {
        if full.starts_with(".google.") || !done.insert(full.clone()) {
            continue;
        }
        let home = files.iter().find(|file| {
            full.strip_prefix(&format!(".{}.", file.package())).is_some_and(|name| !name.contains('.'))
        });
        let file = home.unwrap_or_else(|| panic!("{full} is in no file"));
        let comments = Comments::of(file);
        let message = file.message_type.iter().position(|it| it.name() == short(&full));
        let enumeration = file.enum_type.iter().position(|it| it.name() == short(&full));
        match (message, enumeration) {
            (Some(at), _) => {
                page.message(&full, &file.message_type[at], &[FILE_MESSAGES, index(at)], &comments);
            }
            (_, Some(at)) => {
                page.enumeration(&full, &file.enum_type[at], &[FILE_ENUMS, index(at)], &comments);
            }
            (None, None) => panic!("{full} is not in its file"),
        }
    }
    let methods = page.methods.join("\n");
    let types: String = page.types.into_values().collect();
    format!(
        "{HEAD}\n## Methods\n\n| method | request | response | |\n|---|---|---|---|\n{methods}\n\n## Messages\n{types}"
    )
}

#[test]
fn the_reference_page_matches_the_descriptors() {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let expected = page(&set.file);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(REFERENCE);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = expected.lines().zip(found.lines()).find(|(expected, found)| expected != found);
    assert!(
        expected == found,
        "docs/guide/admin-api.md is out of date at {differs:?}: run BLESS=1 cargo test -p millrace-proto --test reference"
    );
}

/// The comments of methods are shown by reflection and make up the reference page.
#[test]
fn every_method_has_a_comment() {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let mut silent = Vec::new();
    for file in set.file.iter().filter(|file| file.package() == PACKAGE) {
        let comments = Comments::of(file);
        for (at, service) in file.service.iter().enumerate() {
            let path = |method| [FILE_SERVICES, index(at), SERVICE_METHODS, index(method)];
            let methods = service.method.iter().enumerate();
            silent.extend(
                methods.filter(|(at, _)| comments.at(&path(*at)).is_empty()).map(|(_, it)| it.name()),
            );
        }
    }
    assert_eq!(silent, [""; 0]);
}
