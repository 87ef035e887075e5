//! Finds what a library exports: the items that public modules and re-exports reach from lib.rs, under which names.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use syn::{Attribute, Item, ItemImpl, ItemUse, Path, Type, Visibility};

use super::describe::{
    Line, has, implementation, is_hidden, is_public, item_lines, methods, with_conditions,
};
use crate::modules::{Found, Tree, attributes, conditions, leaves, name};

/// The public items of the library that begins with this file, a line each, in the order of their paths.
///
/// # Errors
/// A source that cannot be read or parsed.
pub fn public_items(start: &str, read: &dyn Fn(&str) -> Option<String>) -> Result<Vec<String>> {
    let tree = Tree::read(start, read)?;
    let mut surface =
        Surface { tree: &tree, paths: BTreeMap::new(), entered: BTreeSet::new(), lines: BTreeSet::new() };
    surface.exported_macros();
    surface.enter(0, "");
    for module in 0..tree.modules.len() {
        for item in &tree.modules[module].items {
            surface.describe(module, item);
        }
    }
    Ok(surface.lines.into_iter().map(|line| line.text).collect())
}

struct Surface<'a> {
    tree: &'a Tree,
    /// The file and the name of a definition: the paths under which it is public.
    paths: BTreeMap<(usize, String), BTreeSet<String>>,
    entered: BTreeSet<(usize, String)>,
    lines: BTreeSet<Line>,
}

impl Surface<'_> {
    /// Macros are exported from the root, wherever they are.
    fn exported_macros(&mut self) {
        for module in &self.tree.modules {
            for item in module.items.iter().filter(|item| has(attributes(item), "macro_export")) {
                if let (Item::Macro(_), Some(name)) = (item, name(item)) {
                    self.export(module.file, name.to_string(), name.to_string());
                }
            }
        }
    }

    fn export(&mut self, file: usize, name: String, path: String) {
        self.paths.entry((file, name)).or_default().insert(path);
    }

    /// Exports the public items of a module under this path.
    fn enter(&mut self, module: usize, path: &str) {
        if !self.entered.insert((module, path.to_string())) {
            return;
        }
        let tree = self.tree;
        let file = tree.modules[module].file;
        for item in tree.modules[module].items.iter().filter(|item| !is_hidden(attributes(item))) {
            match item {
                Item::Use(import) if is_public(&import.vis) => self.import(module, path, import),
                Item::Mod(child) if is_public(&child.vis) => {
                    let name = child.ident.to_string();
                    let found = tree.resolve(module, std::slice::from_ref(&name));
                    self.found(found, &join(path, &name));
                }
                item if visibility(item).is_some_and(is_public) => {
                    if let Some(name) = name(item) {
                        self.export(file, name.to_string(), join(path, &name.to_string()));
                    }
                }
                _ => {}
            }
        }
    }

    fn found(&mut self, found: Vec<Found>, path: &str) {
        for found in found {
            match found {
                Found::Module(module) => self.enter(module, path),
                Found::Item { file, name } => self.export(file, name, path.to_string()),
            }
        }
    }

    /// A re-export of this crate's items leads to their definitions. One of another crate's is a line of its own.
    fn import(&mut self, module: usize, path: &str, import: &ItemUse) {
        for (from, name) in leaves(&import.tree) {
            let found = self.tree.resolve(module, &from);
            let from = from.join("::");
            match name.as_str() {
                "_" => {}
                "*" if found.is_empty() => self.line(module, &import.attrs, path, format!("use {from}::*")),
                "*" => self.found(found, path),
                name if found.is_empty() => {
                    let own = join(path, name);
                    let renamed = if from.ends_with(&format!("::{own}")) {
                        String::new()
                    } else {
                        format!(" as {own}")
                    };
                    let text = format!("use {from}{renamed}");
                    self.line(module, &import.attrs, &own, text);
                }
                name => self.found(found, &join(path, name)),
            }
        }
    }

    fn line(&mut self, module: usize, attributes: &[Attribute], path: &str, text: String) {
        let around = self.tree.modules[module].conditions.iter().cloned();
        let text = with_conditions(text, around.chain(conditions(attributes)));
        self.lines.insert(Line { path: path.to_string(), text });
    }

    /// The lines of an item, if it is exported.
    fn describe(&mut self, module: usize, item: &Item) {
        if let Item::Impl(item) = item {
            return self.describe_impl(module, item);
        }
        let exported = visibility(item).is_some_and(is_public) || has(attributes(item), "macro_export");
        let Some(name) = name(item).filter(|_| exported) else { return };
        let Some(paths) = self.paths.get(&(self.tree.modules[module].file, name.to_string())) else { return };
        let Some(first) = shortest(paths) else { return };
        let others: Vec<String> = paths.iter().filter(|path| **path != first).cloned().collect();
        for other in others {
            self.line(module, attributes(item), &other, format!("use {first} as {other}"));
        }
        for line in item_lines(item, &first) {
            self.line(module, attributes(item), &line.path, line.text);
        }
    }

    /// The public functions of an exported type, or that it has a trait that callers can name.
    fn describe_impl(&mut self, module: usize, item: &ItemImpl) {
        if is_hidden(&item.attrs) {
            return;
        }
        let own = path_of(&item.self_ty).and_then(|path| self.exported(module, path));
        let Some((_, of, _)) = &item.trait_ else {
            for line in own.iter().flat_map(|own| methods(item, own)) {
                self.line(module, &item.attrs, &line.path, line.text);
            }
            return;
        };
        let is_ours = !self.tree.resolve(module, &segments(of)).is_empty();
        let of = self.exported(module, of);
        // A trait of ours that nobody can name is no part of the API.
        if is_ours && of.is_none() {
            return;
        }
        if let Some(path) = own.or(of) {
            self.line(module, &item.attrs, &path, implementation(item));
        }
    }

    /// The public path of what a path in a module means, if it is one of our items.
    fn exported(&self, module: usize, path: &Path) -> Option<String> {
        let found = self.tree.resolve(module, &segments(path));
        let paths = found.into_iter().filter_map(|found| match found {
            Found::Item { file, name } => self.paths.get(&(file, name)),
            Found::Module(_) => None,
        });
        paths.filter_map(shortest).next()
    }
}

/// The path under which an item is listed: the one with the fewest modules.
fn shortest(paths: &BTreeSet<String>) -> Option<String> {
    paths.iter().min_by_key(|path| (path.matches("::").count(), path.len())).cloned()
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}::{name}") }
}

fn segments(path: &Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

/// The path of a type without its references.
fn path_of(of: &Type) -> Option<&Path> {
    match of {
        Type::Path(path) => Some(&path.path),
        Type::Reference(reference) => path_of(&reference.elem),
        _ => None,
    }
}

fn visibility(item: &Item) -> Option<&Visibility> {
    Some(match item {
        Item::Const(item) => &item.vis,
        Item::Enum(item) => &item.vis,
        Item::Fn(item) => &item.vis,
        Item::Static(item) => &item.vis,
        Item::Struct(item) => &item.vis,
        Item::Trait(item) => &item.vis,
        Item::Type(item) => &item.vis,
        Item::Union(item) => &item.vis,
        _ => return None,
    })
}
