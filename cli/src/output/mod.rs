//! The printed output: tables for people, documents for programs.

pub(crate) mod bills;
pub(crate) mod documents;
pub(crate) mod events;
pub(crate) mod fields;
mod format;
pub(crate) mod lines;
pub(crate) mod logs;
pub(crate) mod nodes;
pub(crate) mod operations;
pub(crate) mod policies;
pub(crate) mod profiles;
pub(crate) mod residents;
pub(crate) mod responses;
pub(crate) mod slices;
pub(crate) mod table;
pub(crate) mod tenants;
pub(crate) mod text;
pub(crate) mod traces;

use std::io::{ErrorKind, Write as _};

use millrace_types::manifest::{API_VERSION, LIST};
use serde::Serialize;

use crate::failure::CommandFailure;
pub(crate) use crate::output::format::{ListFormat, ListOutput};
use crate::output::table::TextTable;

/// A list as a document, in the shape of a Kubernetes list.
#[derive(Serialize)]
struct List<'a, T> {
    #[serde(rename = "apiVersion")]
    api_version: &'static str,
    kind: &'static str,
    items: &'a [T],
}

fn whole<T>(items: &[T]) -> List<'_, T> {
    List { api_version: API_VERSION, kind: LIST, items }
}

/// Prints text, and a newline if the text does not end with a newline.
pub(crate) fn print(text: &str) -> Result<(), CommandFailure> {
    let mut stdout = std::io::stdout().lock();
    let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.write_all(end.as_bytes()));
    written.and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => CommandFailure::reader_gone(),
        _ => CommandFailure::failed(format!("cannot write to standard output: {error}")),
    })
}

/// Returns an item as JSON or YAML, or `None` for the table formats.
pub(crate) fn document<T: Serialize>(format: ListFormat, item: &T) -> Result<Option<String>, CommandFailure> {
    let failed = |error: String| CommandFailure::failed(format!("cannot write the document: {error}"));
    match format {
        ListFormat::Table | ListFormat::Wide => Ok(None),
        ListFormat::Json => serde_json::to_string_pretty(item).map(Some).map_err(|e| failed(e.to_string())),
        ListFormat::Yaml => serde_saphyr::to_string(item).map(Some).map_err(|e| failed(e.to_string())),
    }
}

/// Prints a listing: a `List` of documents, or a table. If the table has no rows, prints `empty` to
/// stderr.
pub(crate) fn list<T: Serialize>(
    format: ListFormat,
    items: &[T],
    table: &TextTable,
    empty: &str,
) -> Result<(), CommandFailure> {
    if let Some(text) = document(format, &whole(items))? {
        return print(&text);
    }
    if table.is_empty() {
        eprintln!("{empty}");
        return Ok(());
    }
    print(&table.render(format))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Item {
        name: &'static str,
        shape: Vec<i64>,
    }

    #[test]
    fn documents_are_printed_as_json_or_yaml() {
        let list = List { api_version: "v1", kind: "List", items: &[Item { name: "a", shape: vec![1, -1] }] };
        let json = "{\n  \"apiVersion\": \"v1\",\n  \"kind\": \"List\",\n  \"items\": [\n    {\n      \"name\": \"a\",\n      \"shape\": [\n        1,\n        -1\n      ]\n    }\n  ]\n}";
        assert_eq!(document(ListFormat::Json, &list).unwrap().unwrap(), json);
        let yaml = document(ListFormat::Yaml, &list).unwrap().unwrap();
        assert_eq!(yaml, "apiVersion: v1\nkind: List\nitems:\n- name: a\n  shape:\n  - 1\n  - -1\n");
        assert_eq!(document(ListFormat::Table, &list).unwrap(), None);
    }
}
