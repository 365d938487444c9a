//! Reads the files of a crate, and the names in each file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree, Visibility};

/// The files of a crate by module path, such as `crate::raft::log`.
pub(crate) struct Crate {
    pub(crate) files: BTreeMap<String, SourceFile>,
}

/// The names in a file.
#[derive(Debug, Default)]
pub(crate) struct SourceFile {
    /// Names that the file defines.
    pub(crate) defines: BTreeSet<String>,
    /// Names that `use` brings in, with their paths. The flag tells a re-export from a private name.
    pub(crate) imports: BTreeMap<String, (Vec<String>, bool)>,
    /// Paths of `use …::*`.
    pub(crate) globs: Vec<Vec<String>>,
    /// Paths of at least two segments in the code, and single names.
    pub(crate) paths: BTreeSet<Vec<String>>,
}

impl Crate {
    /// Reads the crate with this root file.
    pub(crate) fn read(root: &Path) -> Self {
        let mut krate = Self { files: BTreeMap::new() };
        krate.read_file(root, "crate".to_owned(), root.parent().expect("a folder"));
        krate
    }

    fn read_file(&mut self, path: &Path, module: String, folder: &Path) {
        let text =
            std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (source, children) = SourceFile::parse(&text);
        for child in children {
            let (file, below) = locate(folder, &child);
            self.read_file(&file, format!("{module}::{child}"), &below);
        }
        self.files.insert(module, source);
    }
}

impl SourceFile {
    /// Reads a file. Also returns the names of the child modules that have files of their own.
    pub(crate) fn parse(text: &str) -> (Self, Vec<String>) {
        let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{error} in {text:.200}"));
        let mut reader = Reader::default();
        reader.items(&parsed.items);
        (reader.file, reader.children)
    }
}

/// Returns the file of a child module, and the folder of the child's own children.
fn locate(folder: &Path, child: &str) -> (PathBuf, PathBuf) {
    let below = folder.join(child);
    let flat = folder.join(format!("{child}.rs"));
    if flat.exists() { (flat, below) } else { (below.join("mod.rs"), below) }
}

#[derive(Default)]
struct Reader {
    file: SourceFile,
    children: Vec<String>,
}

impl Reader {
    fn items(&mut self, items: &[Item]) {
        for item in items {
            self.visit_item(item);
        }
    }

    fn import(&mut self, tree: &UseTree, mut path: Vec<String>, exported: bool) {
        match tree {
            UseTree::Path(it) => {
                path.push(it.ident.to_string());
                self.import(&it.tree, path, exported);
            }
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(tree, path.clone(), exported));
            }
            UseTree::Glob(_) => self.file.globs.push(path),
            UseTree::Name(it) if it.ident == "self" => {
                let name = path.last().expect("a path before self").clone();
                self.file.imports.insert(name, (path, exported));
            }
            UseTree::Name(it) => {
                path.push(it.ident.to_string());
                self.file.imports.insert(it.ident.to_string(), (path, exported));
            }
            UseTree::Rename(it) => {
                path.push(it.ident.to_string());
                self.file.imports.insert(it.rename.to_string(), (path, exported));
            }
        }
    }

    /// Reads the paths in the tokens of a macro.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut joints = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if joints != 2 {
                        self.path(std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    joints = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => joints += 1,
                other => {
                    joints = 0;
                    self.path(std::mem::take(&mut path));
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.path(path);
    }

    fn path(&mut self, path: Vec<String>) {
        if !path.is_empty() {
            self.file.paths.insert(path);
        }
    }
}

impl<'a> Visit<'a> for Reader {
    fn visit_item(&mut self, item: &'a Item) {
        if is_test(attributes(item)) {
            return;
        }
        if let Some(name) = defined(item) {
            self.file.defines.insert(name);
        }
        match item {
            Item::Mod(module) => match &module.content {
                Some((_, items)) => self.items(items),
                None => self.children.push(module.ident.to_string()),
            },
            Item::Use(it) => self.import(&it.tree, Vec::new(), !matches!(it.vis, Visibility::Inherited)),
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item(&mut self, item: &'a syn::ImplItem) {
        let tests = matches!(item, syn::ImplItem::Fn(it) if is_test(&it.attrs));
        if !tests {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.path(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, it: &'a syn::Macro) {
        self.tokens(it.tokens.clone());
        visit::visit_macro(self, it);
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute.meta.path().get_ident().map(ToString::to_string).unwrap_or_default();
        text == "test"
            || (text == "cfg"
                && attribute.meta.require_list().is_ok_and(|list| {
                    list.tokens.clone().into_iter().any(|token| token.to_string() == "test")
                }))
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(it) => &it.attrs,
        Item::Enum(it) => &it.attrs,
        Item::Fn(it) => &it.attrs,
        Item::Impl(it) => &it.attrs,
        Item::Macro(it) => &it.attrs,
        Item::Mod(it) => &it.attrs,
        Item::Static(it) => &it.attrs,
        Item::Struct(it) => &it.attrs,
        Item::Trait(it) => &it.attrs,
        Item::Type(it) => &it.attrs,
        Item::Use(it) => &it.attrs,
        _ => &[],
    }
}

/// Returns the name that an item defines.
fn defined(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(it) => &it.ident,
        Item::Enum(it) => &it.ident,
        Item::Fn(it) => &it.sig.ident,
        Item::Macro(it) => it.ident.as_ref()?,
        Item::Static(it) => &it.ident,
        Item::Struct(it) => &it.ident,
        Item::Trait(it) => &it.ident,
        Item::Type(it) => &it.ident,
        Item::Union(it) => &it.ident,
        _ => return None,
    };
    Some(ident.to_string())
}
