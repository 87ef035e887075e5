//! The lines that describe a public item: its signature, and what callers can reach of its parts.

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Field, Fields, Generics, Ident, ImplItem, Item, ItemImpl, Meta, MetaList, Path, Signature,
    Token, TraitItem, Type, Visibility,
};

use super::text::text;
use crate::modules::conditions;

/// A line of the file; lines are in the order of their paths.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub struct Line {
    pub path: String,
    pub text: String,
}

impl Line {
    /// A line about the part of an item, or about the item itself if `part` is empty. `text` gets the path of it.
    fn new(path: &str, part: &str, attributes: &[Attribute], text: impl Fn(&str) -> String) -> Line {
        let path = if part.is_empty() { path.to_string() } else { format!("{path}::{part}") };
        Line { text: with_conditions(text(&path), conditions(attributes)), path }
    }
}

/// The lines of an item that is public under this path.
pub fn item_lines(item: &Item, path: &str) -> Vec<Line> {
    let head = |text: String| Line { path: path.to_string(), text };
    match item {
        Item::Const(item) => vec![head(format!("const {path}: {}", text(&item.ty)))],
        Item::Static(item) => vec![head(format!("static {path}: {}", text(&item.ty)))],
        Item::Fn(item) => vec![head(function(&item.sig, path))],
        Item::Macro(_) => vec![head(format!("macro {path}!"))],
        Item::Type(item) => vec![head(format!("type {path}{} = {}", of(&item.generics), text(&item.ty)))],
        Item::Struct(item) => {
            let hides = item.fields.iter().any(|field| !is_public(&field.vis) || is_hidden(&field.attrs));
            let hidden = if hides { " { .. }" } else { "" };
            let name = named("struct", path, &item.attrs, &item.generics);
            let mut lines = vec![head(name + hidden)];
            lines.extend(fields(&item.fields, path, false));
            lines.extend(derived(&item.attrs, path));
            lines
        }
        Item::Enum(item) => {
            let mut lines = vec![head(named("enum", path, &item.attrs, &item.generics))];
            for variant in item.variants.iter().filter(|variant| !is_hidden(&variant.attrs)) {
                let name = variant.ident.to_string();
                lines.push(Line::new(path, &name, &variant.attrs, |path| format!("variant {path}")));
                lines.extend(fields(&variant.fields, &format!("{path}::{name}"), true));
            }
            lines.extend(derived(&item.attrs, path));
            lines
        }
        Item::Trait(item) => {
            let above = bounds(&item.supertraits);
            let mut lines = vec![head(named("trait", path, &item.attrs, &item.generics) + &above)];
            lines.extend(item.items.iter().filter_map(|item| member(item, path)));
            lines
        }
        _ => Vec::new(),
    }
}

/// The public functions and constants of an inherent `impl`.
pub fn methods(item: &ItemImpl, path: &str) -> Vec<Line> {
    let generic = !item.generics.params.is_empty();
    let own =
        if generic { format!("impl{} {}: ", of(&item.generics), text(&item.self_ty)) } else { String::new() };
    let parts = item.items.iter().filter_map(|part| match part {
        ImplItem::Fn(part) if is_public(&part.vis) && !is_hidden(&part.attrs) => {
            Some(method(path, &part.attrs, &part.sig, ""))
        }
        ImplItem::Const(part) if is_public(&part.vis) && !is_hidden(&part.attrs) => {
            Some(constant(path, &part.attrs, &part.ident, &part.ty))
        }
        _ => None,
    });
    parts.map(|line| Line { text: own.clone() + &line.text, ..line }).collect()
}

/// That a type has a trait. Modules before the trait's name are left out: they differ from import to import.
pub fn implementation(item: &ItemImpl) -> String {
    let name =
        item.trait_.as_ref().and_then(|(_, path, _)| path.segments.last()).map(text).unwrap_or_default();
    format!("impl{} {name} for {}", of(&item.generics), text(&item.self_ty))
}

/// A text with the arguments of `#[cfg]` under which it holds.
pub fn with_conditions(line: String, conditions: impl Iterator<Item = TokenStream>) -> String {
    let conditions = conditions.map(|condition| format!(" #[cfg({})]", text(&condition)));
    conditions.fold(line, |line, condition| if line.contains(&condition) { line } else { line + &condition })
}

pub fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

pub fn has(attributes: &[Attribute], name: &str) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident(name))
}

/// Whether the documentation leaves an item out: then it is for our own macros and crates.
pub fn is_hidden(attributes: &[Attribute]) -> bool {
    let hides = |list: &MetaList| list.path.is_ident("doc") && list.tokens.to_string() == "hidden";
    attributes.iter().any(|attribute| matches!(&attribute.meta, Meta::List(list) if hides(list)))
}

fn member(item: &TraitItem, path: &str) -> Option<Line> {
    Some(match item {
        // Who implements the trait must write a function without a body, hidden or not.
        TraitItem::Fn(item) if item.default.is_some() && is_hidden(&item.attrs) => return None,
        TraitItem::Fn(item) => {
            let provided = if item.default.is_some() { " { .. }" } else { "" };
            method(path, &item.attrs, &item.sig, provided)
        }
        TraitItem::Const(item) => constant(path, &item.attrs, &item.ident, &item.ty),
        TraitItem::Type(item) => Line::new(path, &item.ident.to_string(), &item.attrs, |path| {
            format!("type {path}{}", bounds(&item.bounds))
        }),
        _ => return None,
    })
}

fn method(path: &str, attributes: &[Attribute], sig: &Signature, body: &str) -> Line {
    Line::new(path, &sig.ident.to_string(), attributes, |path| function(sig, path) + body)
}

fn constant(path: &str, attributes: &[Attribute], name: &Ident, of: &Type) -> Line {
    Line::new(path, &name.to_string(), attributes, |path| format!("const {path}: {}", text(of)))
}

/// The fields that callers can reach; with `all` the fields of a variant, which are public.
fn fields(fields: &Fields, path: &str, all: bool) -> Vec<Line> {
    let is_reached = |field: &Field| (all || is_public(&field.vis)) && !is_hidden(&field.attrs);
    let reached = fields.iter().enumerate().filter(|(_, field)| is_reached(field));
    let lines = reached.map(|(at, field)| {
        let name = field.ident.as_ref().map_or(at.to_string(), ToString::to_string);
        Line::new(path, &name, &field.attrs, |path| format!("field {path}: {}", text(&field.ty)))
    });
    lines.collect()
}

/// The traits that `#[derive]` gives to a type, also where `#[cfg_attr]` does so under a condition.
fn derived(attributes: &[Attribute], path: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    for attribute in attributes {
        match &attribute.meta {
            Meta::List(list) if list.path.is_ident("derive") => lines.extend(derives(list, path, None)),
            Meta::List(list) if list.path.is_ident("cfg_attr") => {
                let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
                let parts: Vec<Meta> = parts.into_iter().flatten().collect();
                let [condition, given @ ..] = &parts[..] else { continue };
                for given in given {
                    if let Meta::List(list) = given
                        && list.path.is_ident("derive")
                    {
                        lines.extend(derives(list, path, Some(condition)));
                    }
                }
            }
            _ => {}
        }
    }
    lines
}

/// The traits of a list of `derive`, which holds under a condition.
fn derives(list: &MetaList, path: &str, condition: Option<&Meta>) -> Vec<Line> {
    let paths = list.parse_args_with(Punctuated::<Path, Token![,]>::parse_terminated);
    let names = paths.into_iter().flatten();
    let names = names.filter_map(|path| path.segments.last().map(|last| last.ident.to_string()));
    let condition = condition.map(ToTokens::to_token_stream);
    let text = |name: String| with_conditions(format!("impl {name} for {path}"), condition.iter().cloned());
    names.map(|name| Line { path: path.to_string(), text: text(name) }).collect()
}

/// A function with its path in the place of its name. That it changes an argument in its body is no part of the API.
fn function(sig: &Signature, path: &str) -> String {
    let text = text(sig).replace("(mut ", "(").replace(", mut ", ", ");
    text.replacen(&format!("fn {}", sig.ident), &format!("fn {path}"), 1)
}

fn named(kind: &str, path: &str, attributes: &[Attribute], generics: &Generics) -> String {
    let open = if has(attributes, "non_exhaustive") { "#[non_exhaustive] " } else { "" };
    format!("{open}{kind} {path}{}", of(generics))
}

/// The parameters of a generic item with their bounds.
fn of(generics: &Generics) -> String {
    let parameters =
        if generics.params.is_empty() { String::new() } else { format!("<{}>", text(&generics.params)) };
    let limits = generics.where_clause.as_ref().map(|limits| format!(" {}", text(limits)));
    parameters + &limits.unwrap_or_default()
}

fn bounds(bounds: &Punctuated<syn::TypeParamBound, Token![+]>) -> String {
    if bounds.is_empty() { String::new() } else { format!(": {}", text(bounds)) }
}
