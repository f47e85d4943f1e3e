//! The attribute `#[on(...)]`, which says on which fabrics an integration test runs.

use proc_macro::{Delimiter, TokenStream, TokenTree};

/// Runs a test on the fabrics that its words choose. It stands in the place of `#[test]`.
///
/// | word | the test runs |
/// |---|---|
/// | `shm` | on shared memory only, or takes no fabric |
/// | `each` | on shared memory and over TCP |
/// | `any` | on one of the two, by a hash of its name, and in `make soak` on the other |
/// | `tcp_in_soak` | as well over TCP, in `make soak` |
/// | `rdma` | as well over RDMA, in the guest of `make test` |
/// | `rdma_in_soak` | as well over RDMA, in `make test-rdma` and `make soak` |
///
/// `#[on(each, rdma)] fn a_test() {}` becomes the tests `a_test::shm`, `a_test::tcp` and
/// `a_test::rdma`. What `make test` leaves out ends in `_in_soak`, and is ignored. Other attributes
/// of the test, such as `#[ignore]`, are those of each.
#[proc_macro_attribute]
pub fn on(words: TokenStream, test: TokenStream) -> TokenStream {
    let result = name_of(&test).and_then(|name| {
        let fabrics = fabrics(&name, &words.to_string())?;
        Ok(expand(&name, &fabrics, test))
    });
    result.unwrap_or_else(|why| {
        let error = format!("compile_error!({why:?});");
        error.parse().unwrap_or_default()
    })
}

/// The names of the tests to make: a fabric, and `_in_soak` where `make test` leaves the test out.
fn fabrics(name: &str, words: &str) -> Result<Vec<&'static str>, String> {
    let mut fabrics = Vec::new();
    for word in words.split(',').map(str::trim) {
        match word {
            "shm" => fabrics.push("shm"),
            "each" => fabrics.extend(["shm", "tcp"]),
            "any" if is_odd(name) => fabrics.extend(["shm", "tcp_in_soak"]),
            "any" => fabrics.extend(["shm_in_soak", "tcp"]),
            "tcp_in_soak" => fabrics.push("tcp_in_soak"),
            "rdma" => fabrics.push("rdma"),
            "rdma_in_soak" => fabrics.push("rdma_in_soak"),
            _ => {
                return Err(format!(
                    "{word:?} is none of shm, each, any, tcp_in_soak, rdma, rdma_in_soak"
                ));
            }
        }
    }
    Ok(fabrics)
}

/// A bit of the FNV-1a hash of a name.
fn is_odd(name: &str) -> bool {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    (hash >> 32).count_ones() % 2 == 1
}

/// The name of a function.
fn name_of(test: &TokenStream) -> Result<String, String> {
    let mut tokens = test.clone().into_iter();
    tokens.find(|token| token.to_string() == "fn").ok_or("`on` takes a function")?;
    tokens.next().map(|name| name.to_string()).ok_or_else(|| "`on` takes a function".to_owned())
}

/// The function without its attributes, and a module of its name with the tests.
fn expand(name: &str, fabrics: &[&str], test: TokenStream) -> TokenStream {
    let (mut attributes, mut function) = (String::new(), TokenStream::new());
    let mut tokens = test.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let is_attribute = matches!(&token, TokenTree::Punct(punct) if punct.as_char() == '#');
        match tokens.peek() {
            Some(TokenTree::Group(group)) if is_attribute && is_of_tests(group) => {
                attributes += &format!("#{group}");
                tokens.next();
            }
            _ => function.extend([token]),
        }
    }
    let mut tests = String::new();
    for fabric in fabrics {
        let (of, ignored) = match fabric.strip_suffix("_in_soak") {
            Some(of) => (of, "#[ignore = \"make soak runs it over this fabric, too\"]"),
            None if *fabric == "rdma" => {
                ("rdma", "#[ignore = \"it runs in a guest with a device\"]")
            }
            None => (*fabric, ""),
        };
        let ignored = if attributes.contains("ignore") { "" } else { ignored };
        tests += &format!(
            "#[test] {attributes} {ignored} fn {fabric}() {{
                ::farside_tests::fabric::run(
                    ::core::concat!(::core::module_path!(), \"::{fabric}\"), {of:?}, super::{name},
                );
            }}"
        );
    }
    let module: Result<TokenStream, _> = format!("mod {name} {{ {tests} }}").parse();
    function.extend(module.unwrap_or_default());
    function
}

/// Whether an attribute belongs to the tests, and not to the function.
fn is_of_tests(attribute: &proc_macro::Group) -> bool {
    let first = attribute.stream().into_iter().next().map(|token| token.to_string());
    attribute.delimiter() == Delimiter::Bracket
        && first.is_some_and(|name| name == "ignore" || name == "should_panic")
}
