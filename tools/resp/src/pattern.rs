//! Patterns of keys, as redis' KEYS and SCAN match them: `*`, `?`, `[a-z]`, `[^a]` and `\`.

/// Whether the whole text matches the pattern.
///
/// Takes at most pattern bytes x text bytes steps: of several `*` only the last one is tried again,
/// because an earlier one could not match more than it already has.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    // The place behind the last `*`, and where in the text its rest is tried next.
    let mut star: Option<(usize, usize)> = None;
    loop {
        if pattern.get(at) == Some(&b'*') {
            at += 1;
            star = Some((at, from));
            continue;
        }
        if from == text.len() && at == pattern.len() {
            return true;
        }
        if from < text.len()
            && at < pattern.len()
            && let Some(next) = match_one(pattern, at, text[from])
        {
            (at, from) = (next, from + 1);
            continue;
        }
        let Some((behind, tried)) = star else { return false };
        if tried >= text.len() {
            return false;
        }
        star = Some((behind, tried + 1));
        (at, from) = (behind, tried + 1);
    }
}

/// Matches one byte with the element of the pattern at this place. Returns the place of the next
/// element if it does.
fn match_one(pattern: &[u8], at: usize, byte: u8) -> Option<usize> {
    match pattern[at] {
        b'?' => Some(at + 1),
        b'[' => match_class(pattern, at + 1, byte),
        b'\\' if at + 1 < pattern.len() => (pattern[at + 1] == byte).then_some(at + 2),
        literal => (literal == byte).then_some(at + 1),
    }
}

/// As [`match_one`], for the class of bytes that begins here, behind its bracket. A class without
/// an end lasts to the end of the pattern.
fn match_class(pattern: &[u8], mut at: usize, byte: u8) -> Option<usize> {
    let is_negated = pattern.get(at) == Some(&b'^');
    at += usize::from(is_negated);
    let mut is_in = false;
    loop {
        match pattern.get(at..).unwrap_or_default() {
            [] => break,
            [b']', ..] => {
                at += 1;
                break;
            }
            [b'\\', literal, ..] => {
                is_in |= *literal == byte;
                at += 2;
            }
            [first, b'-', last, ..] => {
                let (low, high) = (first.min(last), first.max(last));
                is_in |= (low..=high).contains(&&byte);
                at += 3;
            }
            [literal, ..] => {
                is_in |= *literal == byte;
                at += 1;
            }
        }
    }
    (is_in != is_negated).then_some(at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(pattern: &str, matching: &[&str], others: &[&str]) {
        for text in matching {
            assert!(matches(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
        }
        for text in others {
            assert!(!matches(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
        }
    }

    #[test]
    fn patterns_match_as_in_redis() {
        check("*", &["", "a", "abc"], &[]);
        check("h?llo", &["hello", "hallo"], &["hllo", "heello"]);
        check("h*llo", &["hllo", "heeeello"], &["hll"]);
        check("h[ae]llo", &["hello", "hallo"], &["hillo"]);
        check("h[^e]llo", &["hallo", "hbllo"], &["hello"]);
        check("h[a-b]llo", &["hallo", "hbllo"], &["hcllo"]);
        check("h[b-a]llo", &["hallo"], &["hcllo"]);
        check(r"a\*b", &["a*b"], &["axb"]);
        check(r"a[\]]b", &["a]b"], &["a\\b"]);
        check("a*b*c", &["abc", "aXbYc", "abbc"], &["abcd", "acb"]);
        check("", &[""], &["a"]);
        check("a[b", &["ab"], &["ac"]);
        check("**a**", &["a", "bab"], &["b"]);
    }

    proptest! {
        #[test]
        fn any_pattern_ends(pattern: Vec<u8>, text: Vec<u8>) {
            matches(&pattern, &text);
        }

        #[test]
        fn a_quoted_text_matches_itself_alone(text: Vec<u8>, other: Vec<u8>) {
            let quoted: Vec<u8> = text.iter().flat_map(|byte| [b'\\', *byte]).collect();
            prop_assert!(matches(&quoted, &text));
            prop_assert_eq!(matches(&quoted, &other), text == other);
        }
    }
}
