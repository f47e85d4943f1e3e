//! Proves that client/public-api.txt lists the API of `farside`, so that no change of it goes
//! unnoticed. The list has all that client/src/lib.rs exports: public fields, variants and methods
//! with their signatures, and the traits that are implemented or derived. Methods come from
//! `define_operations` too; the traits that other macros implement are missing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit_mut::{VisitMut, visit_fields_named_mut};
use syn::{Attribute, ImplItem, Item, ItemImpl, UseTree, Visibility, parse_quote};

const RENEW: &str = "FARSIDE_UPDATE=1 cargo test -p farside-tests --test integration public_api";

fn path(below_top: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(below_top)
}

fn read(below_top: &str) -> String {
    std::fs::read_to_string(path(below_top)).unwrap_or_default()
}

/// Adds the items of all files of Rust below a folder, except those of tests.
fn items_below(folder: &Path, found: &mut Vec<Item>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            items_below(&path, found);
        } else if !path.ends_with("tests.rs") {
            found.extend(syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap().items);
        }
    }
}

/// The paths that a `pub use` exports, by the names that it gives to the items.
fn exports(tree: &UseTree, path: &[String], found: &mut BTreeMap<String, Vec<String>>) {
    let longer = |name: &syn::Ident| [path, &[name.to_string()]].concat();
    match tree {
        UseTree::Path(inner) => exports(&inner.tree, &longer(&inner.ident), found),
        UseTree::Name(name) => drop(found.insert(name.ident.to_string(), longer(&name.ident))),
        UseTree::Rename(name) => drop(found.insert(name.rename.to_string(), longer(&name.ident))),
        UseTree::Group(group) => group.items.iter().for_each(|tree| exports(tree, path, found)),
        UseTree::Glob(_) => panic!("lib.rs exports by name"),
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    let mut lists = attributes.iter().filter_map(|attribute| attribute.meta.require_list().ok());
    lists.any(|list| list.tokens.to_string() == "hidden")
}

/// Removes what is not part of the API: documentation, private fields, and code.
struct Strip;

impl VisitMut for Strip {
    fn visit_attributes_mut(&mut self, attributes: &mut Vec<Attribute>) {
        let kept = ["derive", "non_exhaustive"];
        attributes.retain(|attribute| kept.iter().any(|name| attribute.path().is_ident(name)));
    }

    fn visit_fields_named_mut(&mut self, fields: &mut syn::FieldsNamed) {
        visit_fields_named_mut(self, fields);
        let all = std::mem::take(&mut fields.named);
        let count = all.len();
        fields.named = all.into_iter().filter(|field| is_public(&field.vis)).collect();
        if fields.named.len() < count {
            fields.named.push(parse_quote!(private: _));
        }
    }

    fn visit_fields_unnamed_mut(&mut self, fields: &mut syn::FieldsUnnamed) {
        let private = fields.unnamed.iter_mut().filter(|field| !is_public(&field.vis));
        private.for_each(|field| *field = parse_quote!(_));
    }

    /// The fields of a variant are as public as it is.
    fn visit_variant_mut(&mut self, variant: &mut syn::Variant) {
        self.visit_attributes_mut(&mut variant.attrs);
        variant.fields.iter_mut().for_each(|field| self.visit_attributes_mut(&mut field.attrs));
    }

    fn visit_block_mut(&mut self, block: &mut syn::Block) {
        block.stmts.clear();
    }

    fn visit_receiver_mut(&mut self, receiver: &mut syn::Receiver) {
        receiver.mutability = None;
    }
}

/// Prints an item on one line.
fn print(mut item: Item) -> String {
    Strip.visit_item_mut(&mut item);
    let file = syn::File { shebang: None, frontmatter: None, attrs: Vec::new(), items: vec![item] };
    let words: Vec<_> =
        prettyplease::unparse(&file).split_whitespace().map(str::to_owned).collect();
    words.join(" ").replace(" {} }", "; }").replace(", )", ")").replace("( ", "(") + "\n"
}

/// Returns the methods that `define_operations!(this, result, 'store)` defines.
fn operations(arguments: &str) -> Vec<ImplItem> {
    let file = read("client/src/operations.rs");
    let body = file.split_once("=> {\n").unwrap().1.rsplit_once("    };\n").unwrap().0;
    let (this, rest) = arguments.split_once(',').unwrap();
    let (result, store) = rest.rsplit_once(',').unwrap();
    let body = body.replace("$this", this).replace("$result", result).replace("$store", store);
    syn::parse_str::<ItemImpl>(&format!("impl Operations {{ {body} }}")).unwrap().items
}

/// Prints the public part of an implementation: a line for a trait, or one for each method.
fn print_impl(item: &ItemImpl) -> Vec<String> {
    if item.trait_.is_some() {
        let is_type = |inner: &&ImplItem| matches!(inner, ImplItem::Type(_));
        let items = item.items.iter().filter(is_type).cloned().collect();
        return vec![print(Item::Impl(ItemImpl { items, ..item.clone() }))];
    }
    let expanded = item.items.iter().flat_map(|inner| match inner {
        ImplItem::Macro(call) => operations(&call.mac.tokens.to_string()),
        inner => vec![inner.clone()],
    });
    let public = expanded.filter(|inner| match inner {
        ImplItem::Fn(method) => is_public(&method.vis) && !is_hidden(&method.attrs),
        ImplItem::Const(constant) => is_public(&constant.vis),
        _ => false,
    });
    public.map(|it| print(Item::Impl(ItemImpl { items: vec![it], ..item.clone() }))).collect()
}

/// Prints the definition and the implementations of the type, trait, constant or function of this
/// name. Prints nothing if it is not defined here.
fn list(items: &[Item], name: &str) -> String {
    let is_name = |path: &syn::Path| path.segments.last().is_some_and(|last| last.ident == name);
    let is_trait = items.iter().any(|item| matches!(item, Item::Trait(it) if it.ident == name));
    let (mut found, mut definitions) = (BTreeSet::new(), Vec::new());
    for item in items {
        let (ident, visibility) = match item {
            Item::Struct(it) => (&it.ident, &it.vis),
            Item::Enum(it) => (&it.ident, &it.vis),
            Item::Type(it) => (&it.ident, &it.vis),
            Item::Const(it) => (&it.ident, &it.vis),
            Item::Trait(it) => (&it.ident, &it.vis),
            Item::Fn(it) => (&it.sig.ident, &it.vis),
            Item::Impl(it) => {
                let is_of_type = matches!(&*it.self_ty, syn::Type::Path(of) if is_name(&of.path));
                let is_of_trait = is_trait && it.trait_.as_ref().is_some_and(|it| is_name(&it.0));
                if is_of_type || is_of_trait {
                    found.extend(print_impl(it));
                }
                continue;
            }
            _ => continue,
        };
        if ident == name && is_public(visibility) {
            definitions.push(print(item.clone()));
        }
    }
    assert!(definitions.len() <= 1, "{name} is defined twice: {definitions:?}");
    definitions
        .into_iter()
        .flat_map(|definition| [definition].into_iter().chain(found.clone()))
        .collect()
}

#[on(shm)]
fn the_list_of_the_public_api_is_current() {
    let names = ["layout", "fabric", "metrics", "protocol", "control", "config", "../client"];
    let crates = names.map(|name| {
        let mut items = Vec::new();
        items_below(&path(&format!("common/{name}/src")), &mut items);
        (name, items)
    });
    let mut exported = BTreeMap::new();
    for item in syn::parse_file(&read("client/src/lib.rs")).unwrap().items {
        match item {
            Item::Use(item) if is_public(&item.vis) => exports(&item.tree, &[], &mut exported),
            Item::Mod(module) => assert!(!is_public(&module.vis), "{} is public", module.ident),
            _ => {}
        }
    }
    let mut listed = format!("The public API of farside. To renew: {RENEW}\n");
    for (name, origin) in exported {
        let own = origin[0].strip_prefix("farside_").unwrap_or("../client");
        // The crate that exports it may have it from a lower one.
        let (first, others): (Vec<_>, Vec<_>) = crates.iter().partition(|(name, _)| *name == own);
        let mut lists = first.iter().chain(&others).map(|it| list(&it.1, origin.last().unwrap()));
        let found = lists.find(|list| !list.is_empty());
        listed += &format!("\n# {name}\n{}", found.unwrap_or_else(|| panic!("no {origin:?}")));
    }
    if std::env::var_os("FARSIDE_UPDATE").is_some() {
        std::fs::write(path("client/public-api.txt"), &listed).unwrap();
    }
    let recorded = read("client/public-api.txt");
    let [old, new] = [&recorded, &listed].map(|text| text.lines().collect::<BTreeSet<_>>());
    let (removed, added) = (&old - &new, &new - &old);
    assert!(
        recorded == listed,
        "the API changed. If it should: {RENEW}\nremoved: {removed:#?}\nadded: {added:#?}"
    );
}

/// A change of each kind changes the list.
#[on(shm)]
fn the_list_has_what_is_public() {
    let list = |text: &str| list(&syn::parse_file(text).unwrap().items, "A");
    let shown = list(
        "/// D.\n#[derive(Debug)] pub struct A { pub b: u8, c: u8 } struct B;
         impl A { pub fn d(mut self, e: u8) -> u8 { e } fn f() {} #[doc(hidden)] pub fn g() {} }
         impl Iterator for A { type Item = u8; fn next(&mut self) -> Option<u8> { None } }",
    );
    assert_eq!(
        shown,
        "#[derive(Debug)] pub struct A { pub b: u8, private: _, }\n\
         impl A { pub fn d(self, e: u8) -> u8; }\nimpl Iterator for A { type Item = u8; }\n"
    );
    assert_eq!(
        list("#[x] pub enum A { B(u8), C { d: u8 } }"),
        "pub enum A { B(u8), C { d: u8 }, }\n"
    );
    assert_eq!(list("struct A;"), "");
    assert_eq!(
        list("pub trait A: B { fn c(&self) { d() } } impl A for [u8] {}"),
        "pub trait A: B { fn c(&self); }\nimpl A for [u8] {}\n"
    );
}
