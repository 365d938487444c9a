//! Manifests from files, folders and standard input, all checked before any is used.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use millrace_types::manifest::{self, FunctionManifest};
use millrace_types::{FunctionKey, FunctionSpec, TenantName};

use crate::failure::Failure;

/// What a manifest looks like, for those whose is refused.
const MANIFEST: &str = "a function is: {apiVersion: millrace/v1, kind: Function, metadata: {name: NAME}, spec: {model: {file: FILE.onnx}}}";

/// A function asked for, and where its model is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Item {
    pub(crate) spec: FunctionSpec,
    pub(crate) model: PathBuf,
    /// The file that asks for it, for messages.
    pub(crate) source: PathBuf,
}

/// Reads every manifest of these paths: a file, a folder (its .yaml and .yml files, in the order of
/// their names), or `-`. `tenant` is whose the functions are that name no tenant.
pub(crate) fn read(paths: &[PathBuf], tenant: &TenantName) -> Result<Vec<Item>, Failure> {
    let mut items = Vec::new();
    for path in paths {
        for (source, text) in texts(path)? {
            let manifests = manifest::parse(&text)
                .map_err(|error| Failure::usage(error.to_string()).about(source.display()).hint(MANIFEST))?;
            for manifest in manifests {
                items.push(item(manifest, &source, tenant)?);
            }
        }
    }
    refuse_repeats(&items)?;
    Ok(items)
}

/// A path's manifests as text, each with the file it is from.
fn texts(path: &Path) -> Result<Vec<(PathBuf, String)>, Failure> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(|error| unreadable(path, &error))?;
        return Ok(vec![(PathBuf::from("standard input"), text)]);
    }
    let files = if path.is_dir() { manifests_in(path)? } else { vec![path.to_owned()] };
    let read = |file: PathBuf| {
        let text = std::fs::read_to_string(&file).map_err(|error| unreadable(&file, &error))?;
        Ok((file, text))
    };
    files.into_iter().map(read).collect()
}

fn manifests_in(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = std::fs::read_dir(folder).map_err(|error| unreadable(folder, &error))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| unreadable(folder, &error))?.path();
        if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(Failure::usage(format!("{} has no .yaml files", folder.display()))
            .hint("name the folder that holds the manifests, or a file"));
    }
    files.sort();
    Ok(files)
}

fn item(manifest: FunctionManifest, source: &Path, tenant: &TenantName) -> Result<Item, Failure> {
    let FunctionManifest { mut spec, model_file } = manifest;
    let own = &spec.key.tenant;
    if *own == TenantName::default() {
        spec.key.tenant = tenant.clone();
    } else if own != tenant && *tenant != TenantName::default() {
        return Err(Failure::usage(format!("{} is of tenant {own}, not {tenant}", spec.key.name))
            .about(source.display())
            .hint("leave --tenant out, or the tenant in the manifest"));
    }
    // Standard input has no folder: a path in it is relative to where the command runs.
    let model = source.parent().unwrap_or(Path::new("")).join(model_file);
    Ok(Item { spec, model, source: source.to_owned() })
}

fn refuse_repeats(items: &[Item]) -> Result<(), Failure> {
    let mut seen: BTreeMap<&FunctionKey, &Path> = BTreeMap::new();
    for item in items {
        if let Some(first) = seen.insert(&item.spec.key, &item.source) {
            let message = format!("function {} is also in {}", item.spec.key, first.display());
            return Err(Failure::usage(message).about(item.source.display()).hint("rename one of the two"));
        }
    }
    Ok(())
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!("cannot read {}: {error}", path.display()))
        .hint("name a manifest, a folder of them, or - for standard input")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(name: &str) -> String {
        format!(
            "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: {name}}}\nspec: {{model: {{file: m.onnx}}}}\n"
        )
    }

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn read_all(folder: &tempfile::TempDir, tenant: &str) -> Result<Vec<Item>, Failure> {
        read(&[folder.path().to_owned()], &TenantName::new(tenant).unwrap())
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_its_names() {
        let folder = folder(&[
            ("b.yml", &manifest("second")),
            ("a.yaml", &format!("{}---\n{}", manifest("first"), manifest("also"))),
            ("notes.txt", "not a manifest"),
        ]);
        let items = read_all(&folder, "team").unwrap();
        let names: Vec<_> = items.iter().map(|item| item.spec.key.to_string()).collect();
        assert_eq!(names, ["team/first", "team/also", "team/second"]);
        assert_eq!(items[0].model, folder.path().join("m.onnx"));
    }

    #[test]
    fn the_same_function_in_two_files_is_refused() {
        let folder = folder(&[("a.yaml", &manifest("one")), ("b.yaml", &manifest("one"))]);
        let message = read_all(&folder, "default").unwrap_err().message.unwrap();
        assert!(message.contains("b.yaml: function default/one is also in") && message.contains("a.yaml"));
    }

    #[test]
    fn an_error_names_its_file() {
        let folder = folder(&[("a.yaml", &manifest("Bad"))]);
        let message = read_all(&folder, "default").unwrap_err().message.unwrap();
        assert!(message.contains("a.yaml: document 1"), "{message}");
    }

    #[test]
    fn another_tenant_than_asked_for_is_refused() {
        let text = manifest("one").replace("{name: one}", "{name: one, tenant: mine}");
        let folder = folder(&[("a.yaml", &text)]);
        assert_eq!(read_all(&folder, "default").unwrap()[0].spec.key.tenant.as_str(), "mine");
        assert_eq!(read_all(&folder, "mine").unwrap()[0].spec.key.tenant.as_str(), "mine");
        assert!(read_all(&folder, "theirs").unwrap_err().message.unwrap().contains("not theirs"));
    }

    #[test]
    fn an_empty_folder_and_a_missing_file_say_what_to_name() {
        let folder = folder(&[]);
        assert!(read_all(&folder, "default").unwrap_err().hint.is_some());
        assert!(read(&[folder.path().join("none.yaml")], &TenantName::default()).unwrap_err().hint.is_some());
    }
}
