//! Checks that the files of each crate have an order in which they can be read: no two use each
//! other, directly or by way of others, except a module and the modules below it. Names are
//! followed through `use` to the file that defines them, because the root of a crate exports what
//! its files define, and so hides which of them uses which. Guards against files that can only be
//! understood all at once.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit_mut::{self, VisitMut};
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree};

use super::{report, with_extension};

/// Rings that `common/fabric` still has: its folders do not separate yet what transports share.
const LEFT_IN_FABRIC: [&str; 3] = [
    "rdma verbs/ffi verbs/identifier verbs/preflight",
    "verbs/direct verbs/fabric",
    "verbs/handles verbs/lanes verbs/local_memory",
];

/// The segments of a path.
type Names = Vec<String>;
/// The modules of a crate, by their paths below its root.
type Modules = BTreeMap<Names, Module>;
/// Files by their path.
type Sources = BTreeMap<String, String>;

/// A module, without the code for tests.
#[derive(Default)]
struct Module {
    /// The module whose file it is in: another one if it is in braces.
    file: Names,
    /// The paths that `use` declarations name, by the names that they give.
    imports: BTreeMap<String, Names>,
    /// The modules of which they import everything.
    globs: Vec<Names>,
    defined: BTreeSet<String>,
    /// All paths in the code, `use` declarations included, except those in arguments of macros.
    paths: Vec<Names>,
}

impl Module {
    fn add_use(&mut self, tree: &UseTree, path: &[String]) {
        let longer = |name: &syn::Ident| [path, &[name.to_string()]].concat();
        let (name, path) = match tree {
            UseTree::Path(inner) => return self.add_use(&inner.tree, &longer(&inner.ident)),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.add_use(tree, path));
            }
            UseTree::Glob(_) => {
                self.globs.push(path.to_vec());
                return self.paths.push(path.to_vec());
            }
            UseTree::Name(name) if name.ident == "self" => (path.last().cloned(), path.to_vec()),
            UseTree::Name(name) => (Some(name.ident.to_string()), longer(&name.ident)),
            UseTree::Rename(name) => (Some(name.rename.to_string()), longer(&name.ident)),
        };
        self.imports.extend(name.map(|name| (name, path.clone())));
        self.paths.push(path);
    }
}

impl VisitMut for Module {
    fn visit_item_use_mut(&mut self, item: &mut ItemUse) {
        self.add_use(&item.tree, &[]);
    }

    fn visit_path_mut(&mut self, path: &mut syn::Path) {
        // A name alone is a definition of this module, or an import. `pub(super)` uses nothing.
        if path.segments.len() > 1 {
            self.paths.push(path.segments.iter().map(|part| part.ident.to_string()).collect());
        }
        visit_mut::visit_path_mut(self, path);
    }
}

/// The name that an item defines.
fn name_of(item: &Item) -> Option<&syn::Ident> {
    match item {
        Item::Const(it) => Some(&it.ident),
        Item::Enum(it) => Some(&it.ident),
        Item::Fn(it) => Some(&it.sig.ident),
        Item::Macro(it) => it.ident.as_ref(),
        Item::Static(it) => Some(&it.ident),
        Item::Struct(it) => Some(&it.ident),
        Item::Trait(it) => Some(&it.ident),
        Item::Type(it) => Some(&it.ident),
        Item::Union(it) => Some(&it.ident),
        _ => None,
    }
}

/// Whether an item is a module or a `use` for tests, or a module whose file is in another folder.
fn is_left_out(item: &Item) -> bool {
    let (Item::Mod(ItemMod { attrs, .. }) | Item::Use(ItemUse { attrs, .. })) = item else {
        return false;
    };
    let is_test = |list: &syn::MetaList| list.tokens.to_string() == "test";
    let is_for_tests = |it: &Attribute| it.meta.require_list().is_ok_and(is_test);
    attrs.iter().any(|it| it.path().is_ident("path") || is_for_tests(it))
}

fn parse(content: &str) -> Vec<Item> {
    syn::parse_file(content).unwrap().items
}

/// Adds a module of the crate in this folder, and those below it. `file` has its items.
fn load(
    items: Vec<Item>,
    at: &[String],
    file: &[String],
    (folder, sources): (&str, &Sources),
    modules: &mut Modules,
) {
    let mut module = Module { file: file.to_vec(), ..Module::default() };
    for mut item in items {
        if is_left_out(&item) {
            continue;
        }
        module.defined.extend(name_of(&item).map(ToString::to_string));
        let Item::Mod(below) = item else {
            module.visit_item_mut(&mut item);
            continue;
        };
        let path = [at, &[below.ident.to_string()]].concat();
        if let Some((_, items)) = below.content {
            load(items, &path, file, (folder, sources), modules);
            continue;
        }
        let start = format!("{folder}/{}", path.join("/"));
        let content = sources.get(&format!("{start}.rs"));
        let content = content.or_else(|| sources.get(&format!("{start}/mod.rs")));
        let content = content.unwrap_or_else(|| panic!("there is no {start}.rs"));
        load(parse(content), &path, &path, (folder, sources), modules);
    }
    modules.insert(at.to_vec(), module);
}

/// What a path or a name leads to.
enum Target {
    Module(Names),
    /// An item that is defined in this module.
    Item(Names),
    OtherCrate,
    Unknown,
}

/// Finds a name in a module. It follows at most so many imports.
fn find(modules: &Modules, at: &[String], name: &str, depth: usize) -> Target {
    let module = &modules[at];
    let child = [at, &[name.to_owned()]].concat();
    if modules.contains_key(&child) {
        return Target::Module(child);
    }
    if let Some(path) = module.imports.get(name).filter(|path| *path != &[name]) {
        return match resolve(modules, at, path, depth) {
            Target::Unknown => Target::OtherCrate,
            found => found,
        };
    }
    if module.defined.contains(name) {
        return Target::Item(at.to_vec());
    }
    for glob in module.globs.iter().filter(|_| depth > 0) {
        if let Target::Module(from) = resolve(modules, at, glob, depth)
            && let found @ (Target::Module(_) | Target::Item(_)) =
                find(modules, &from, name, depth - 1)
        {
            return found;
        }
    }
    Target::Unknown
}

/// Finds what a path in this module leads to.
fn resolve(modules: &Modules, at: &[String], path: &[String], depth: usize) -> Target {
    let mut here = at.to_vec();
    for (number, name) in path.iter().enumerate() {
        match &**name {
            "crate" => here.clear(),
            "super" => drop(here.pop()),
            "self" => {}
            _ if depth == 0 => return Target::Unknown,
            name => match find(modules, &here, name, depth - 1) {
                Target::Module(found) => here = found,
                // An item that a macro defines.
                Target::Unknown if number > 0 => return Target::Item(here),
                found => return found,
            },
        }
    }
    Target::Module(here)
}

/// The rings of a crate with this root, each by its files, and the arrows in it.
fn rings(root: &str, sources: &Sources) -> Vec<(BTreeSet<String>, Vec<String>)> {
    const IMPORTS_MAX: usize = 8;
    let (folder, _) = root.rsplit_once('/').unwrap();
    let mut modules = Modules::new();
    load(parse(&sources[root]), &[], &[], (folder, sources), &mut modules);
    let mut arrows: BTreeMap<&Names, BTreeSet<&Names>> = BTreeMap::new();
    for (at, module) in &modules {
        for path in &module.paths {
            let found = resolve(&modules, at, path, IMPORTS_MAX);
            let (Target::Module(to) | Target::Item(to)) = found else { continue };
            let (from, to) = (&module.file, &modules[&to].file);
            // The root is above all files, so it would excuse every ring.
            if from != to && !from.is_empty() && !to.is_empty() {
                arrows.entry(from).or_default().insert(to);
            }
        }
    }
    let reached = |from| {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            let below = arrows.get(file).into_iter().flatten().copied();
            next.extend(below.filter(|to| reached.insert(*to)));
        }
        reached
    };
    let reached: BTreeMap<_, _> = arrows.keys().map(|from| (*from, reached(*from))).collect();
    let reaches =
        |from: &Names, to: &Names| reached.get(from).is_some_and(|files| files.contains(&to));
    let mut found = BTreeMap::new();
    for file in arrows.keys().filter(|file| reaches(file, file)) {
        let ring: Vec<_> = reached[file].iter().filter(|it| reaches(it, file)).copied().collect();
        let is_below = |top: &&Names| ring.iter().all(|it| it.starts_with(top));
        if ring.iter().any(is_below) {
            continue;
        }
        let inside = ring.iter().flat_map(|from| arrows[from].iter().map(move |to| (from, to)));
        let inside = inside.filter(|(_, to)| ring.contains(to));
        let arrow =
            |(from, to): (&&Names, &&Names)| format!("  {} uses {}", from.join("/"), to.join("/"));
        found.insert(ring.iter().map(|it| it.join("/")).collect(), inside.map(arrow).collect());
    }
    found.into_iter().collect()
}

#[on(shm)]
fn files_use_each_other_in_one_order() {
    let sources: Sources = with_extension(".rs").collect();
    let is_root = |path: &&String| {
        let program = path.split_once("/src/bin/").map(|(_, file)| file);
        path.ends_with("/src/lib.rs")
            || path.ends_with("/src/main.rs")
            || program.is_some_and(|file| file.ends_with("/main.rs") || !file.contains('/'))
    };
    let (mut count, mut broken) = (0, Vec::new());
    for root in sources.keys().filter(is_root) {
        count += 1;
        for (files, arrows) in rings(root, &sources) {
            let is_in = |left: &&str| files.iter().all(|file| left.split(' ').any(|it| it == file));
            if !root.starts_with("common/fabric/") || !LEFT_IN_FABRIC.iter().any(is_in) {
                broken.push(format!("{root}, {} files:\n{}", files.len(), arrows.join("\n")));
            }
        }
    }
    assert!(count >= 25, "only {count} crates were found");
    report("files use each other in one order", &broken);
}

#[on(shm)]
fn rings_are_found_behind_exports() {
    let found = |files: &[(&str, &str)]| {
        let own = |(path, content): &(&str, &str)| (format!("a/src/{path}"), content.to_string());
        let found = rings("a/src/lib.rs", &files.iter().map(own).collect());
        found.into_iter().map(|(files, _)| Vec::from_iter(files).join(" ")).collect::<Vec<_>>()
    };
    let root = ("lib.rs", "mod b; mod c; pub use b::B; pub use c::*;");
    let b = ("b.rs", "use crate::C; pub struct B;");
    // By the root, in code and in a `use` declaration.
    assert_eq!(found(&[root, b, ("c.rs", "pub struct C(crate::B);")]), ["b c"]);
    assert_eq!(found(&[root, b, ("c.rs", "pub struct C; mod d { use crate::B; }")]), ["b c"]);
    let test = "pub struct C; #[cfg(test)] mod d { use crate::B; }";
    assert_eq!(found(&[root, b, ("c.rs", test)]), [""; 0]);
    // By a parent that renames what its own children define.
    let root = ("lib.rs", "mod p;");
    let [x, y] = [("p/x.rs", "use super::Y; pub struct X;"), ("p/y.rs", "pub struct Y(super::Z);")];
    let parent = "mod x; mod y; pub use x::X as Z; pub use self::y::Y;";
    assert_eq!(found(&[root, ("p/mod.rs", parent), x, y]), ["p/x p/y"]);
    // A parent and its children, and an import of another crate.
    let parent = "mod x; mod y; use y::V; pub struct Y; struct Z;";
    let y = ("p/y.rs", "use super::Z; pub struct V;");
    assert_eq!(found(&[root, ("p.rs", parent), x, y]), [""; 0]);
    let parent = "mod x; mod y; use std::fmt; pub struct Z(x::X);";
    let x = ("p/x.rs", "use crate::p::y::V; use super::fmt; pub struct X;");
    assert_eq!(found(&[root, ("p.rs", parent), x, ("p/y.rs", "pub struct V;")]), [""; 0]);
}
