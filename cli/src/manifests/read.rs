//! Reads manifests from files, folders and standard input, and checks all of them before any is used.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use millrace_types::manifest::{self, FunctionManifest, Manifest, ManifestKind, ModelSource};
use millrace_types::{FunctionKey, TenantName};

use super::items::{FunctionItem, Items, ModelLocation, RuleItem, WorkflowItem};
use super::order::in_order;
use super::rules::Rule;
use crate::failure::CommandFailure;

/// Examples of manifests, for the hint of a refusal.
const FUNCTION: &str = "a function is: {apiVersion: millrace/v1, kind: Function, metadata: {name: NAME}, spec: {model: {file: FILE.onnx}}}";
const WORKFLOW: &str = "a workflow is: {apiVersion: millrace/v1, kind: Workflow, metadata: {name: NAME}, spec: {inputs: [INPUT], steps: [{name: STEP, function: NAME, inputs: {INPUT: input.INPUT}}], outputs: {OUTPUT: STEP.OUTPUT}}}";
const TENANT: &str = "a tenant is: {apiVersion: millrace/v1, kind: Tenant, metadata: {name: NAME}, spec: {gpusMax: 2, gpuShare: 0.5, memoryShare: 0.5}}";
const POLICY: &str = "the policy is: {apiVersion: millrace/v1, kind: Policy, metadata: {name: cluster}, spec: {preset: lalb-o3, eviction: replicas, overtakesMax: 9, batching: off}}";

/// Reads every manifest of these paths. A path is a file, a folder (its .yaml and .yml files, in
/// the order of their names), or `-`. `tenant` applies to manifests that name no tenant.
pub(crate) fn read(paths: &[PathBuf], tenant: &TenantName) -> Result<Items, CommandFailure> {
    let mut items = Items::default();
    for path in paths {
        for (source, text) in texts(path)? {
            let manifests = manifest::parse(&text).map_err(|error| {
                CommandFailure::usage(error.to_string()).about(source.display()).hint(shape(error.kind()))
            })?;
            for manifest in manifests {
                items.add(manifest, &source, tenant)?;
            }
        }
    }
    items.refuse_repeats()?;
    items.workflows = in_order(items.workflows)?;
    items.rules.sort_by_key(|item| matches!(item.rule, Rule::Policy(_)));
    Ok(items)
}

impl Items {
    fn add(&mut self, manifest: Manifest, source: &Path, tenant: &TenantName) -> Result<(), CommandFailure> {
        match manifest {
            Manifest::Function(FunctionManifest { mut spec, model }) => {
                settle_tenant(&mut spec.key, source, tenant)?;
                let model = match model {
                    // Standard input has no folder, so its paths are relative to the working
                    // directory.
                    ModelSource::File { path, declared } => {
                        let path = source.parent().unwrap_or(Path::new("")).join(path);
                        ModelLocation::File { path, declared }
                    }
                    ModelSource::Cluster(digest) => ModelLocation::Cluster(digest),
                };
                self.functions.push(FunctionItem { spec, model, source: source.to_owned() });
            }
            Manifest::Workflow(mut spec) => {
                settle_tenant(&mut spec.key, source, tenant)?;
                self.workflows.push(WorkflowItem { spec, source: source.to_owned() });
            }
            Manifest::Tenant(tenant) => self.add_rule(Rule::Tenant(tenant), source),
            Manifest::Policy(spec) => self.add_rule(Rule::Policy(spec), source),
        }
        Ok(())
    }

    /// Adds a rule. Rules belong to the cluster, so the tenant of the settings does not apply.
    fn add_rule(&mut self, rule: Rule, source: &Path) {
        self.rules.push(RuleItem { rule, source: source.to_owned() });
    }

    fn refuse_repeats(&self) -> Result<(), CommandFailure> {
        self.refuse_repeated_models()?;
        let mut seen: BTreeMap<String, &Path> = BTreeMap::new();
        for RuleItem { rule, source } in &self.rules {
            if let Some(first) = seen.insert(rule.title(), source) {
                let message = format!("{} is also in {}", rule.title(), first.display());
                let failure = CommandFailure::usage(message).about(source.display());
                return Err(failure.hint("remove one of the two"));
            }
        }
        Ok(())
    }

    /// Refuses a name that occurs twice. Functions and workflows share a name space.
    fn refuse_repeated_models(&self) -> Result<(), CommandFailure> {
        let functions = self.functions.iter().map(|item| (&item.spec.key, "function", item.source.as_path()));
        let workflows = self.workflows.iter().map(|item| (&item.spec.key, "workflow", item.source.as_path()));
        let mut seen: BTreeMap<&FunctionKey, (&str, &Path)> = BTreeMap::new();
        for (key, kind, source) in functions.chain(workflows) {
            let Some((other, first)) = seen.insert(key, (kind, source)) else { continue };
            let message = match kind == other {
                true => format!("{kind} {key} is also in {}", first.display()),
                false => format!("{kind} {key} has the name of a {other} in {}", first.display()),
            };
            return Err(CommandFailure::usage(message).about(source.display()).hint("rename one of the two"));
        }
        Ok(())
    }
}

/// Returns an example manifest of a kind, or of a function if the kind is unknown.
fn shape(kind: Option<ManifestKind>) -> &'static str {
    match kind {
        Some(ManifestKind::Workflow) => WORKFLOW,
        Some(ManifestKind::Tenant) => TENANT,
        Some(ManifestKind::Policy) => POLICY,
        Some(ManifestKind::Function) | None => FUNCTION,
    }
}

/// Returns a path's manifests as text, each with its file.
fn texts(path: &Path) -> Result<Vec<(PathBuf, String)>, CommandFailure> {
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

fn manifests_in(folder: &Path) -> Result<Vec<PathBuf>, CommandFailure> {
    let entries = std::fs::read_dir(folder).map_err(|error| unreadable(folder, &error))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| unreadable(folder, &error))?.path();
        if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(CommandFailure::usage(format!("{} has no .yaml files", folder.display()))
            .hint("name the folder that holds the manifests, or a file"));
    }
    files.sort();
    Ok(files)
}

/// Sets the tenant of an item whose manifest names none.
fn settle_tenant(key: &mut FunctionKey, source: &Path, tenant: &TenantName) -> Result<(), CommandFailure> {
    if key.tenant == TenantName::default() {
        key.tenant = tenant.clone();
    } else if key.tenant != *tenant && *tenant != TenantName::default() {
        return Err(CommandFailure::usage(format!(
            "{} belongs to tenant {}, not {tenant}",
            key.name, key.tenant
        ))
        .about(source.display())
        .hint("omit --tenant, or the tenant in the manifest"));
    }
    Ok(())
}

fn unreadable(path: &Path, error: &std::io::Error) -> CommandFailure {
    CommandFailure::usage(format!("cannot read {}: {error}", path.display()))
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

    /// Returns a workflow of a single step.
    fn workflow(name: &str, runs: &str) -> String {
        format!(
            "apiVersion: millrace/v1\nkind: Workflow\nmetadata: {{name: {name}}}\nspec:\n  inputs: [x]\n  steps: [{{name: only, {runs}, inputs: {{x: input.x}}}}]\n  outputs: {{y: only.y}}\n"
        )
    }

    fn tenant(name: &str) -> String {
        format!("apiVersion: millrace/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{gpusMax: 2}}\n")
    }

    fn policy(dispatch: &str) -> String {
        format!(
            "apiVersion: millrace/v1\nkind: Policy\nmetadata: {{name: cluster}}\nspec: {{dispatch: {dispatch}}}\n"
        )
    }

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn read_all(folder: &tempfile::TempDir, tenant: &str) -> Result<Items, CommandFailure> {
        read(&[folder.path().to_owned()], &TenantName::new(tenant).unwrap())
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_its_names() {
        let folder = folder(&[
            ("b.yml", &manifest("second")),
            ("a.yaml", &format!("{}---\n{}", manifest("first"), manifest("also"))),
            ("notes.txt", "not a manifest"),
        ]);
        let items = read_all(&folder, "team").unwrap().functions;
        let names: Vec<_> = items.iter().map(|item| item.spec.key.to_string()).collect();
        assert_eq!(names, ["team/first", "team/also", "team/second"]);
        let path = folder.path().join("m.onnx");
        assert_eq!(items[0].model, ModelLocation::File { path, declared: None });
    }

    #[test]
    fn the_same_function_in_two_files_is_refused() {
        let folder = folder(&[("a.yaml", &manifest("one")), ("b.yaml", &manifest("one"))]);
        let message = read_all(&folder, "default").unwrap_err().message.unwrap();
        assert!(message.contains("b.yaml: function default/one is also in") && message.contains("a.yaml"));
    }

    #[test]
    fn functions_and_workflows_are_read_from_one_folder_and_workflows_are_ordered() {
        let folder = folder(&[
            (
                "a.yaml",
                &format!(
                    "{}---\n{}",
                    workflow("outer", "workflow: inner"),
                    workflow("alone", "function: one")
                ),
            ),
            ("b.yaml", &workflow("inner", "function: one")),
            ("c.yaml", &manifest("one")),
        ]);
        let items = read_all(&folder, "team").unwrap();
        let names: Vec<_> = items.workflows.iter().map(|item| item.spec.key.to_string()).collect();
        assert_eq!(names, ["team/alone", "team/inner", "team/outer"]);
        assert_eq!(items.functions.len(), 1);
        assert_eq!(items.workflows[1].source, folder.path().join("b.yaml"));
    }

    #[test]
    fn a_function_and_a_workflow_of_one_name_are_refused() {
        let folder = folder(&[("a.yaml", &workflow("one", "function: two")), ("b.yaml", &manifest("one"))]);
        let message = read_all(&folder, "default").unwrap_err().message.unwrap();
        assert!(message.contains("a.yaml: workflow default/one has the name of a function in"), "{message}");
    }

    #[test]
    fn tenants_precede_the_policy_and_repeated_rules_are_refused() {
        let all = folder(&[
            ("a.yaml", &policy("fifo")),
            ("b.yaml", &tenant("zeta")),
            ("c.yaml", &format!("{}---\n{}", tenant("acme"), manifest("one"))),
        ]);
        // Rules ignore the tenant of the settings.
        let items = read_all(&all, "team").unwrap();
        let titles: Vec<_> = items.rules.iter().map(|item| item.rule.title()).collect();
        assert_eq!(titles, ["tenant/zeta", "tenant/acme", "policy/cluster"]);
        assert_eq!(items.functions.len(), 1);
        for (text, says) in [
            (tenant("acme"), "b.yaml: tenant/acme is also in"),
            (policy("fifo"), "b.yaml: policy/cluster is also in"),
        ] {
            let twice = folder(&[("a.yaml", &text), ("b.yaml", &text)]);
            let message = read_all(&twice, "default").unwrap_err().message.unwrap();
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn an_error_names_its_file() {
        let folder = folder(&[("a.yaml", &manifest("Bad"))]);
        let message = read_all(&folder, "default").unwrap_err().message.unwrap();
        assert!(message.contains("a.yaml: document 1"), "{message}");
    }

    #[test]
    fn a_hint_shows_an_example_of_the_refused_kind() {
        let hint = |text: &str| read_all(&folder(&[("a.yaml", text)]), "default").unwrap_err().hint.unwrap();
        assert!(hint(&manifest("Bad")).starts_with("a function is: "));
        assert!(hint(&workflow("Bad", "function: one")).starts_with("a workflow is: "));
        assert!(hint(&tenant("Bad")).starts_with("a tenant is: "));
        assert!(hint(&policy("native")).starts_with("the policy is: "));
        // The hint matches the refused document, whatever else is in the file, even if the document
        // cannot be parsed.
        let unknown = policy("fifo").replace("dispatch", "dipsatch");
        for (good, bad, says) in [
            (workflow("one", "function: two"), manifest("Bad"), "a function is: "),
            (manifest("one"), policy("native"), "the policy is: "),
            (workflow("one", "function: two"), unknown, "the policy is: "),
        ] {
            let hinted = [format!("{good}---\n{bad}"), format!("{bad}---\n{good}")].map(|text| hint(&text));
            assert!(hinted.iter().all(|hint| hint.starts_with(says)), "{hinted:?}");
        }
        for (shown, is_function) in [(FUNCTION, true), (WORKFLOW, false), (TENANT, false), (POLICY, false)] {
            let (_, example) = shown.split_once(": ").unwrap();
            let example = ["NAME", "STEP", "INPUT", "OUTPUT"]
                .iter()
                .fold(example.to_owned(), |text, word| text.replace(word, &word.to_lowercase()));
            let read = millrace_types::manifest::parse(&example).unwrap().remove(0);
            assert_eq!(read.function().is_some(), is_function, "{example}");
        }
    }

    #[test]
    fn a_manifest_of_another_tenant_is_refused() {
        let text = manifest("one").replace("{name: one}", "{name: one, tenant: mine}");
        let folder = folder(&[("a.yaml", &text)]);
        let tenant = |asked| read_all(&folder, asked).unwrap().functions[0].spec.key.tenant.to_string();
        assert_eq!([tenant("default"), tenant("mine")], ["mine", "mine"]);
        assert!(read_all(&folder, "theirs").unwrap_err().message.unwrap().contains("not theirs"));
    }

    #[test]
    fn an_empty_folder_and_a_missing_file_are_refused_with_a_hint() {
        let folder = folder(&[]);
        assert!(read_all(&folder, "default").unwrap_err().hint.is_some());
        assert!(read(&[folder.path().join("none.yaml")], &TenantName::default()).unwrap_err().hint.is_some());
    }
}
