//! Test of the links in the pages (`*.md`): each link within the repository leads to an existing
//! file, folder or heading, under the heading names of GitHub. Links to other sites are not
//! followed.

mod workspace;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// The headings and links of a page.
#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    /// The names of the headings, as links use them.
    headings: BTreeSet<String>,
    /// The links within the repository, with their line numbers.
    links: Vec<(usize, String)>,
}

impl Page {
    fn read(text: &str) -> Self {
        let mut page = Self::default();
        let mut seen = BTreeMap::<String, u32>::new();
        let mut in_code = false;
        for (index, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_code = !in_code;
            } else if !in_code {
                if let Some(name) = heading(line) {
                    let before = seen.entry(name.clone()).or_default();
                    page.headings.insert(if *before == 0 { name } else { format!("{name}-{before}") });
                    *before += 1;
                }
                page.links.extend(targets(line).into_iter().map(|target| (index + 1, target)));
            }
        }
        page
    }
}

/// Returns the link name of a heading: its letters, digits and underscores in lower case, with
/// hyphens for spaces.
fn heading(line: &str) -> Option<String> {
    let title = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#'))?;
    let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    Some(kept.map(|c| if c == ' ' { '-' } else { c }).flat_map(char::to_lowercase).collect())
}

/// Returns the link targets of a line within the repository. Text between backticks is not a link.
fn targets(line: &str) -> Vec<String> {
    let prose: String = line.split('`').step_by(2).collect();
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.to_owned()).filter(|target| !target.contains("://")).collect()
}

/// Resolves a path from a folder of the workspace to a path from the root; `None` if the path
/// leaves the workspace.
fn resolved(folder: &Path, path: &str) -> Option<PathBuf> {
    let mut found = PathBuf::new();
    for component in folder.join(path).components() {
        match component {
            Component::Normal(name) => found.push(name),
            Component::CurDir => {}
            Component::ParentDir if found.pop() => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(found)
}

fn leads_somewhere(pages: &BTreeMap<PathBuf, Page>, from: &Path, target: &str) -> bool {
    let (path, heading) = target.split_once('#').unwrap_or((target, ""));
    let folder = from.parent().unwrap_or(Path::new(""));
    let to = if path.is_empty() { Some(from.to_owned()) } else { resolved(folder, path) };
    let Some(to) = to.filter(|to| workspace::root().join(to).exists()) else { return false };
    heading.is_empty() || pages.get(&to).is_some_and(|page| page.headings.contains(heading))
}

#[test]
fn links_in_pages_lead_to_existing_files_and_headings() {
    let files = workspace::files(".md").into_iter();
    let pages: BTreeMap<PathBuf, Page> =
        files.map(|file| (file.clone(), Page::read(&workspace::text(&file)))).collect();
    let mut broken = Vec::new();
    for (file, page) in &pages {
        for (line, target) in &page.links {
            if !leads_somewhere(&pages, file, target) {
                broken.push(format!("{}:{line}: {target}", file.display()));
            }
        }
    }
    assert!(broken.is_empty(), "these links lead nowhere:\n{}", broken.join("\n"));
    let readme = pages.get(Path::new("README.md")).expect("the repository has a README.md");
    assert!(!readme.links.is_empty(), "the test found no links in README.md");
}

#[test]
fn headings_and_links_of_a_page_are_found() {
    let text = "\
# What `a_b` is, and why

See [there](docs/x.md#y) and [`here`](#no-1), not [a site](https://example.org/z) or `[code](z.md)`.

```
# Not a heading
[code](z.md)
```
## No
## No
#no
";
    let page = Page {
        headings: ["what-a_b-is-and-why", "no", "no-1"].map(str::to_owned).into(),
        links: vec![(3, "docs/x.md#y".to_owned()), (3, "#no-1".to_owned())],
    };
    assert_eq!(Page::read(text), page);

    // The page stands in for an existing page.
    let at = PathBuf::from("docs/reliability.md");
    let pages = BTreeMap::from([(at.clone(), page)]);
    let leads = |target| leads_somewhere(&pages, &at, target);
    assert!(["#no", "../README.md", "./../types", "../docs/reliability.md"].into_iter().all(leads));
    assert!(!["#yes", "none.md", "../README.md#no", "../../README.md", "/README.md"].into_iter().any(leads));
}
