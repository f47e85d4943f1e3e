//! What commands see of a request.

/// The arguments of a request, the first of which is the command's name.
pub(crate) trait Arguments {
    fn count(&self) -> usize;
    fn get(&self, number: usize) -> &[u8];

    /// Whether an argument is this word, in letters of any case.
    fn is(&self, number: usize, word: &str) -> bool {
        self.get(number).eq_ignore_ascii_case(word.as_bytes())
    }
}
