//! Finds which file of a crate uses which names of which other file. Every path in the code is resolved to the file
//! that defines the name. An import is an arrow. A re-export is not, because a user of the name reaches the file that
//! defines it.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItemFn, ItemFn, ItemMod, ItemUse, Macro, Path, Visibility};

use crate::modules::{Found, Tree, is_test, leaves};

/// The arrows of a crate, by the numbers of its files: (user, used) and the names.
pub fn arrows(tree: &Tree) -> BTreeMap<(usize, usize), BTreeSet<String>> {
    let mut arrows = BTreeMap::new();
    for module in 0..tree.modules.len() {
        let mut paths = Paths { tree, module, arrows: &mut arrows };
        for item in &tree.modules[module].items {
            paths.visit_item(item);
        }
    }
    arrows
}

/// Follows the paths of one module.
struct Paths<'a> {
    tree: &'a Tree,
    module: usize,
    arrows: &'a mut BTreeMap<(usize, usize), BTreeSet<String>>,
}

impl Paths<'_> {
    fn add(&mut self, found: Vec<Found>) {
        let user = self.tree.modules[self.module].file;
        for found in found {
            if let Found::Item { file, name } = found
                && file != user
            {
                self.arrows.entry((user, file)).or_default().insert(name);
            }
        }
    }

    fn path(&mut self, path: &[String]) {
        self.add(self.tree.resolve(self.module, path));
    }

    /// The paths in the tokens of a macro's call or rules.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.path(&std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.path(&std::mem::take(&mut path));
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.path(&path);
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_path(&mut self, path: &'ast Path) {
        if path.leading_colon.is_none() {
            let segments: Vec<String> =
                path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.path(&segments);
        }
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, import: &'ast ItemUse) {
        if !matches!(import.vis, Visibility::Inherited) {
            return;
        }
        for (path, name) in leaves(&import.tree) {
            let found = self.tree.resolve(self.module, &path);
            let is_module = found.iter().any(|found| matches!(found, Found::Module(_)));
            // A use through a module is found where it happens.
            if name != "*" && !is_module {
                self.add(found);
            }
        }
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.visit_path(&call.path);
        self.tokens(call.tokens.clone());
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    /// Modules are visited by themselves; attributes and visibilities use nothing.
    fn visit_item_mod(&mut self, _: &'ast ItemMod) {}

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}
