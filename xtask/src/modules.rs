//! The modules of a crate: the file of each module, the names in it, and the meaning of paths in it.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use proc_macro2::TokenStream;
use syn::visit::Visit;
use syn::{Attribute, Expr, ExprLit, Ident, Item, ItemMod, ItemUse, Lit, Meta, UseTree};

/// The modules of one library or program, without tests. The first one is the root.
pub struct Tree {
    pub files: Vec<String>,
    pub modules: Vec<Module>,
}

#[derive(Default)]
pub struct Module {
    pub file: usize,
    pub items: Vec<Item>,
    /// The arguments of `#[cfg]` of the module and of the modules around it.
    pub conditions: Vec<TokenStream>,
    parent: usize,
    names: BTreeMap<String, Vec<Name>>,
    globs: Vec<Vec<String>>,
}

/// The meaning of a name in a module.
enum Name {
    Module(usize),
    Item,
    Import(Vec<String>),
}

/// The target of a path.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    Module(usize),
    Item { file: usize, name: String },
}

impl Tree {
    /// Reads all modules, beginning with the root's file.
    ///
    /// # Errors
    /// A file of a module that is missing or is not Rust.
    pub fn read(start: &str, read: &dyn Fn(&str) -> Option<String>) -> Result<Tree> {
        let tree = Tree { files: Vec::new(), modules: Vec::new() };
        let mut reader = Reader { read, tree, conditions: Vec::new() };
        reader.file(start, folder(start), 0)?;
        Ok(reader.tree)
    }

    /// The targets of a path in a module. There are none for names of another crate, and several if a module and an
    /// item share a name.
    pub fn resolve(&self, module: usize, path: &[String]) -> Vec<Found> {
        self.follow(module, path, &mut Vec::new())
    }

    fn follow(&self, module: usize, path: &[String], busy: &mut Vec<(usize, String)>) -> Vec<Found> {
        let Some((first, rest)) = path.split_first() else { return Vec::new() };
        let mut found = match first.as_str() {
            "crate" => vec![Found::Module(0)],
            "self" => vec![Found::Module(module)],
            "super" => vec![Found::Module(self.modules[module].parent)],
            name => self.lookup(module, name, busy),
        };
        for segment in rest {
            let modules = found.iter().filter_map(|found| match found {
                Found::Module(module) => Some(*module),
                Found::Item { .. } => None,
            });
            let modules: Vec<usize> = modules.collect();
            // A segment after an item is a variant or a function of the item.
            if modules.is_empty() {
                return found;
            }
            found = modules.into_iter().flat_map(|module| self.member(module, segment, busy)).collect();
        }
        found
    }

    /// A segment of a path that follows a module.
    fn member(&self, module: usize, name: &str, busy: &mut Vec<(usize, String)>) -> Vec<Found> {
        let Module { file, parent, names, globs, .. } = &self.modules[module];
        match name {
            "self" => vec![Found::Module(module)],
            "super" => vec![Found::Module(*parent)],
            // A macro defined it.
            _ if !names.contains_key(name) && globs.is_empty() => {
                vec![Found::Item { file: *file, name: name.to_string() }]
            }
            _ => self.lookup(module, name, busy),
        }
    }

    /// The meaning of a name within a module.
    fn lookup(&self, module: usize, name: &str, busy: &mut Vec<(usize, String)>) -> Vec<Found> {
        let key = (module, name.to_string());
        if busy.contains(&key) {
            return Vec::new();
        }
        busy.push(key);
        let here = &self.modules[module];
        let mut found = Vec::new();
        for meaning in here.names.get(name).into_iter().flatten() {
            match meaning {
                Name::Module(module) => found.push(Found::Module(*module)),
                Name::Item => found.push(Found::Item { file: here.file, name: name.to_string() }),
                Name::Import(path) => found.extend(self.follow(module, path, busy)),
            }
        }
        if !here.names.contains_key(name) {
            for glob in &here.globs {
                for source in self.follow(module, glob, busy) {
                    if let Found::Module(source) = source {
                        found.extend(self.lookup(source, name, busy));
                    }
                }
            }
        }
        busy.pop();
        found
    }
}

struct Reader<'a> {
    read: &'a dyn Fn(&str) -> Option<String>,
    tree: Tree,
    conditions: Vec<TokenStream>,
}

impl Reader<'_> {
    /// Reads a file as a module whose children are in `children`; gives the module's number.
    fn file(&mut self, file: &str, children: String, parent: usize) -> Result<usize> {
        let text = (self.read)(file).with_context(|| format!("{file}: cannot be read"))?;
        let parsed = syn::parse_file(&text).with_context(|| format!("{file}: is not Rust"))?;
        self.tree.files.push(file.to_string());
        self.module(parsed.items, self.tree.files.len() - 1, &children, parent)
    }

    fn module(&mut self, items: Vec<Item>, file: usize, children: &str, parent: usize) -> Result<usize> {
        let number = self.tree.modules.len();
        let conditions = self.conditions.clone();
        self.tree.modules.push(Module { file, parent, conditions, ..Module::default() });
        let items: Vec<Item> = items.into_iter().filter(|item| !is_test(attributes(item))).collect();
        for item in &items {
            match item {
                Item::Mod(child) => self.child(child, number, children)?,
                Item::Use(import) => self.import(number, &import.tree),
                code => self.inner_imports(number, code),
            }
            if let Some(name) = name(item) {
                self.name(number, name.to_string(), Name::Item);
            }
        }
        self.tree.modules[number].items = items;
        Ok(number)
    }

    fn child(&mut self, child: &ItemMod, parent: usize, children: &str) -> Result<()> {
        let name = child.ident.to_string();
        let file = self.tree.modules[parent].file;
        let around = self.conditions.len();
        self.conditions.extend(conditions(&child.attrs));
        let module = match &child.content {
            Some((_, items)) => self.module(items.clone(), file, &format!("{children}/{name}"), parent)?,
            None => {
                let path = match path_attribute(&child.attrs) {
                    Some(path) => vec![format!("{}/{path}", parent_folder(&self.tree.files[file]))],
                    None => vec![format!("{children}/{name}.rs"), format!("{children}/{name}/mod.rs")],
                };
                let Some(path) = path.iter().find(|path| (self.read)(path).is_some()) else {
                    bail!(
                        "{}: has no file for `mod {name}`: expected {}",
                        self.tree.files[file],
                        path.join(" or ")
                    )
                };
                self.file(path, folder(path), parent)?
            }
        };
        self.conditions.truncate(around);
        self.name(parent, name, Name::Module(module));
        Ok(())
    }

    fn name(&mut self, module: usize, name: String, meaning: Name) {
        self.tree.modules[module].names.entry(name).or_default().push(meaning);
    }

    fn import(&mut self, module: usize, tree: &UseTree) {
        for (path, name) in leaves(tree) {
            match name.as_str() {
                "*" => self.tree.modules[module].globs.push(path),
                "_" => {}
                _ => self.name(module, name, Name::Import(path)),
            }
        }
    }

    /// Imports inside of functions count for the whole module.
    fn inner_imports(&mut self, module: usize, code: &Item) {
        let mut imports = Imports(Vec::new());
        imports.visit_item(code);
        for tree in imports.0 {
            self.import(module, &tree);
        }
    }
}

/// The imports in the middle of code.
struct Imports(Vec<UseTree>);

impl<'ast> Visit<'ast> for Imports {
    fn visit_item_use(&mut self, import: &'ast ItemUse) {
        self.0.push(import.tree.clone());
    }
}

/// The paths of an import, each with the name that it gives to the module: `*` for all names, `_` for none.
pub fn leaves(tree: &UseTree) -> Vec<(Vec<String>, String)> {
    let under = |first: String, tree: &UseTree| {
        let prefix = |(mut path, name): (Vec<String>, String)| {
            // `use a::{self}` imports `a` under its own name.
            let name = if name == "self" { first.clone() } else { name };
            path.insert(0, first.clone());
            (path, name)
        };
        leaves(tree).into_iter().map(prefix).collect()
    };
    match tree {
        UseTree::Path(path) => under(path.ident.to_string(), &path.tree),
        UseTree::Name(name) if name.ident == "self" => vec![(Vec::new(), "self".into())],
        UseTree::Name(name) => vec![(vec![name.ident.to_string()], name.ident.to_string())],
        UseTree::Rename(rename) if rename.ident == "self" => vec![(Vec::new(), rename.rename.to_string())],
        UseTree::Rename(rename) => vec![(vec![rename.ident.to_string()], rename.rename.to_string())],
        UseTree::Glob(_) => vec![(Vec::new(), "*".into())],
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
    }
}

/// Whether these attributes leave an item out of the product.
pub fn is_test(attributes: &[Attribute]) -> bool {
    let mut conditions = conditions(attributes).map(|condition| condition.to_string().replace(' ', ""));
    conditions.any(|condition| condition == "test" || condition.starts_with("all(test,"))
}

/// The arguments of `#[cfg]` among these attributes.
pub fn conditions(attributes: &[Attribute]) -> impl Iterator<Item = TokenStream> {
    attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => Some(list.tokens.clone()),
        _ => None,
    })
}

/// The name that an item defines.
pub fn name(item: &Item) -> Option<&Ident> {
    Some(match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    })
}

/// The attributes of an item.
pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The file of a module that `#[path = ".."]` names.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(path), .. }) => Some(path.value()),
            _ => None,
        },
        _ => None,
    })
}

fn parent_folder(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The folder with the files of a module's children.
fn folder(file: &str) -> String {
    match file.rsplit_once('/') {
        Some((folder, "lib.rs" | "main.rs" | "mod.rs")) => folder.to_string(),
        _ => file.trim_end_matches(".rs").to_string(),
    }
}
