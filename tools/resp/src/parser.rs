//! Requests: arrays of bulk strings, and inline commands.
//!
//! The parser reads a buffer that grows while bytes arrive, and keeps its place in it. So no byte
//! is looked at twice, however small the pieces are. Arguments stay where they are in the buffer.
//! An argument that is longer than any that could be of use is dropped while it arrives: only its
//! length is kept, for the error.

use std::ops::Range;

use super::parse_integer;

/// The longest line of a header or an inline command, in bytes. As in redis.
const LINE_BYTES_MAX: usize = 64 << 10;
/// The most arguments of a client that has not given its password. As in redis.
const ARGUMENTS_MAX_UNAUTHENTICATED: i64 = 10;
/// The longest argument of such a client, in bytes. As in redis.
const BULK_BYTES_MAX_UNAUTHENTICATED: i64 = 16384;

/// What a request may be at most.
#[derive(Clone, Copy, Debug)]
pub struct ParserLimits {
    /// The most arguments.
    pub arguments_max: usize,
    /// The longest argument that a client may announce, in bytes.
    pub bulk_bytes_max: usize,
    /// The longest argument that is kept, in bytes.
    pub kept_bytes_max: usize,
    /// The most bytes of a whole request that are kept.
    pub request_bytes_max: usize,
}

impl Default for ParserLimits {
    /// The limits of redis.
    fn default() -> Self {
        let bulk_bytes_max = 512 << 20;
        Self {
            arguments_max: 1024 * 1024,
            bulk_bytes_max,
            kept_bytes_max: bulk_bytes_max,
            request_bytes_max: 1 << 30,
        }
    }
}

/// Why the bytes are no request. The connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages, which are those of redis, say what they are")]
pub enum ProtocolError {
    #[error("Protocol error: too big inline request")]
    LongInline,
    #[error("Protocol error: unbalanced quotes in request")]
    UnbalancedQuotes,
    #[error("Protocol error: too big mbulk count string")]
    LongCount,
    #[error("Protocol error: invalid multibulk length")]
    Count,
    #[error("Protocol error: unauthenticated multibulk length")]
    UnauthenticatedCount,
    #[error("Protocol error: too big bulk count string")]
    LongLength,
    #[error("Protocol error: expected '$', got '{}'", char::from(*.0))]
    NoBulk(u8),
    #[error("Protocol error: invalid bulk length")]
    Length,
    #[error("Protocol error: unauthenticated bulk length")]
    UnauthenticatedLength,
    #[error("Protocol error: the request is too long")]
    LongRequest,
}

/// How far the parser came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are needed; this many at least, as far as known.
    Incomplete(usize),
    /// A request is complete. It ends at this place of the buffer. It has no argument if it is to
    /// be ignored.
    Complete(usize),
}

/// The place of an argument.
#[derive(Clone, Debug)]
enum Argument {
    /// In the input, from its start on.
    Input(Range<usize>),
    /// In the parser's own memory: it had quotes.
    Unquoted(Range<usize>),
    /// Dropped, because it has too many bytes.
    TooLong,
}

#[derive(Debug, Default)]
enum Step {
    /// Nothing of the request is read yet.
    #[default]
    Start,
    /// The header of an argument comes next.
    Header,
    /// An argument of this many bytes comes next.
    Bulk(usize),
    /// This many bytes of an argument are still to be dropped.
    Dropping(usize),
}

/// The parser of a connection.
#[derive(Debug, Default)]
pub struct RequestParser {
    limits: ParserLimits,
    step: Step,
    /// The place up to which the request has been read.
    at: usize,
    /// The arguments that are still to come.
    left: usize,
    arguments: Vec<Argument>,
    /// The length of the first argument that was dropped.
    too_long: Option<usize>,
    unquoted: Vec<u8>,
}

impl RequestParser {
    /// A parser with these limits.
    pub fn new(limits: ParserLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// The number of the arguments of a complete request, with its name.
    pub fn count(&self) -> usize {
        self.arguments.len()
    }

    /// An argument of the complete request at the start of `input`; empty if there is none, or if
    /// it was too long.
    #[inline]
    pub fn argument<'i>(&'i self, input: &'i [u8], number: usize) -> &'i [u8] {
        match self.arguments.get(number) {
            Some(Argument::Input(range)) => input.get(range.clone()).unwrap_or_default(),
            Some(Argument::Unquoted(range)) => self.unquoted.get(range.clone()).unwrap_or_default(),
            Some(Argument::TooLong) | None => &[],
        }
    }

    /// The length of the first argument that was too long, in bytes, if there is one.
    pub fn too_long(&self) -> Option<usize> {
        self.too_long
    }

    /// Forgets the complete request. The next one begins at the start of the input.
    #[inline]
    pub fn reset(&mut self) {
        (self.step, self.at, self.left, self.too_long) = (Step::Start, 0, 0, None);
        self.arguments.clear();
        self.unquoted.clear();
        if self.arguments.capacity() > 1024 {
            self.arguments.shrink_to(1024);
        }
    }

    /// Reads on in the bytes of `input` behind `start`, where the request begins. Removes the
    /// bytes of arguments that are too long.
    ///
    /// # Errors
    /// [`ProtocolError`]. Then the parser is of no use any more.
    #[inline]
    pub fn parse(
        &mut self,
        input: &mut Vec<u8>,
        start: usize,
        is_authenticated: bool,
    ) -> Result<Progress, ProtocolError> {
        loop {
            let bytes = input.get(start..).unwrap_or_default();
            match self.step {
                Step::Start => match bytes.first() {
                    None => return Ok(Progress::Incomplete(1)),
                    Some(b'*') => {
                        let Some(count) = self.count_line(bytes, is_authenticated)? else {
                            return Ok(Progress::Incomplete(1));
                        };
                        self.left = count;
                        self.step = Step::Header;
                    }
                    Some(_) => return self.inline(bytes),
                },
                Step::Header if self.left == 0 => return Ok(Progress::Complete(self.at)),
                Step::Header => {
                    let Some(length) = self.length_line(bytes, is_authenticated)? else {
                        return Ok(Progress::Incomplete(1));
                    };
                    self.step = if length > self.limits.kept_bytes_max {
                        self.arguments.push(Argument::TooLong);
                        self.too_long = self.too_long.or(Some(length));
                        Step::Dropping(length)
                    } else if self.at + length > self.limits.request_bytes_max {
                        return Err(ProtocolError::LongRequest);
                    } else {
                        Step::Bulk(length)
                    };
                }
                Step::Bulk(length) => {
                    let end = self.at + length + 2;
                    if bytes.len() < end {
                        return Ok(Progress::Incomplete(end - bytes.len()));
                    }
                    self.arguments.push(Argument::Input(self.at..self.at + length));
                    (self.at, self.step) = (end, Step::Header);
                    self.left -= 1;
                }
                Step::Dropping(left) => {
                    let from = start + self.at;
                    let dropped = left.min(input.len() - from);
                    input.drain(from..from + dropped);
                    self.step = Step::Dropping(left - dropped);
                    if dropped == left {
                        // The end of its line is left.
                        if input.len() < from + 2 {
                            return Ok(Progress::Incomplete(1));
                        }
                        (self.at, self.step) = (self.at + 2, Step::Header);
                        self.left -= 1;
                    } else {
                        return Ok(Progress::Incomplete(1));
                    }
                }
            }
        }
    }

    /// Reads the line that begins here with one byte of a type. Returns the text behind that byte;
    /// `None` if its end has not come yet.
    #[inline]
    fn line<'b>(
        &mut self,
        bytes: &'b [u8],
        too_long: ProtocolError,
    ) -> Result<Option<&'b [u8]>, ProtocolError> {
        let rest = &bytes[self.at..];
        let Some(end) = rest.iter().take(LINE_BYTES_MAX + 1).position(|byte| *byte == b'\r') else {
            return if rest.len() > LINE_BYTES_MAX { Err(too_long) } else { Ok(None) };
        };
        if rest.len() < end + 2 {
            return Ok(None);
        }
        self.at += end + 2;
        Ok(Some(rest.get(1..end).unwrap_or_default()))
    }

    /// Reads the number of the arguments.
    fn count_line(
        &mut self,
        bytes: &[u8],
        is_authenticated: bool,
    ) -> Result<Option<usize>, ProtocolError> {
        let Some(text) = self.line(bytes, ProtocolError::LongCount)? else { return Ok(None) };
        let count = parse_integer(text).ok_or(ProtocolError::Count)?;
        if count > self.limits.arguments_max as i64 {
            return Err(ProtocolError::Count);
        }
        if !is_authenticated && count > ARGUMENTS_MAX_UNAUTHENTICATED {
            return Err(ProtocolError::UnauthenticatedCount);
        }
        Ok(Some(usize::try_from(count).unwrap_or(0)))
    }

    /// Reads the length of the next argument.
    #[inline]
    fn length_line(
        &mut self,
        bytes: &[u8],
        is_authenticated: bool,
    ) -> Result<Option<usize>, ProtocolError> {
        match bytes.get(self.at) {
            None => return Ok(None),
            Some(b'$') => {}
            Some(other) => {
                // Redis looks for the end of the line first.
                let other = *other;
                let line = self.line(bytes, ProtocolError::LongLength)?;
                return line.map_or(Ok(None), |_| Err(ProtocolError::NoBulk(other)));
            }
        }
        let Some(text) = self.line(bytes, ProtocolError::LongLength)? else { return Ok(None) };
        let length = parse_integer(text).filter(|length| *length >= 0);
        let length = length.ok_or(ProtocolError::Length)?;
        if length > self.limits.bulk_bytes_max as i64 {
            return Err(ProtocolError::Length);
        }
        if !is_authenticated && length > BULK_BYTES_MAX_UNAUTHENTICATED {
            return Err(ProtocolError::UnauthenticatedLength);
        }
        Ok(Some(length as usize))
    }

    /// Reads an inline command: a line with arguments between spaces, which may be in quotes.
    fn inline(&mut self, bytes: &[u8]) -> Result<Progress, ProtocolError> {
        let Some(end) = bytes.iter().take(LINE_BYTES_MAX + 1).position(|byte| *byte == b'\n')
        else {
            let is_long = bytes.len() > LINE_BYTES_MAX;
            return if is_long {
                Err(ProtocolError::LongInline)
            } else {
                Ok(Progress::Incomplete(1))
            };
        };
        let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
        self.split(line)?;
        Ok(Progress::Complete(end + 1))
    }

    /// Splits a line into its arguments.
    fn split(&mut self, line: &[u8]) -> Result<(), ProtocolError> {
        let mut rest = line;
        loop {
            let spaces = rest.iter().take_while(|byte| is_space(**byte)).count();
            rest = &rest[spaces..];
            // As in a C string, a zero byte ends the line.
            if rest.is_empty() || rest[0] == 0 {
                return Ok(());
            }
            let start = self.unquoted.len();
            rest = self.unquote(rest)?;
            self.arguments.push(Argument::Unquoted(start..self.unquoted.len()));
        }
    }

    /// Reads one argument, and returns what comes behind it.
    fn unquote<'l>(&mut self, mut rest: &'l [u8]) -> Result<&'l [u8], ProtocolError> {
        loop {
            match rest {
                [] | [0, ..] => return Ok(rest),
                [space, ..] if is_space(*space) => return Ok(rest),
                [quote @ (b'"' | b'\''), quoted @ ..] => {
                    rest = self.quoted(*quote, quoted)?;
                    // A closing quote ends the argument.
                    return match rest.first() {
                        Some(next) if !is_space(*next) && *next != 0 => {
                            Err(ProtocolError::UnbalancedQuotes)
                        }
                        _ => Ok(rest),
                    };
                }
                [byte, behind @ ..] => {
                    self.unquoted.push(*byte);
                    rest = behind;
                }
            }
        }
    }

    /// Reads the text between quotes, and returns what comes behind the closing quote.
    fn quoted<'l>(&mut self, quote: u8, mut rest: &'l [u8]) -> Result<&'l [u8], ProtocolError> {
        loop {
            let (byte, behind) = match rest {
                [] | [0, ..] => return Err(ProtocolError::UnbalancedQuotes),
                [end, behind @ ..] if *end == quote => return Ok(behind),
                [b'\\', b'x', high, low, behind @ ..]
                    if quote == b'"' && high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
                {
                    (hex(*high) << 4 | hex(*low), behind)
                }
                [b'\\', escaped, behind @ ..] if quote == b'"' && *escaped != 0 => {
                    (escape(*escaped), behind)
                }
                [b'\\', b'\'', behind @ ..] if quote == b'\'' => (b'\'', behind),
                [byte, behind @ ..] => (*byte, behind),
            };
            self.unquoted.push(byte);
            rest = behind;
        }
    }
}

/// The white space of C.
fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

fn hex(digit: u8) -> u8 {
    char::from(digit).to_digit(16).map_or(0, |digit| digit as u8)
}

fn escape(letter: u8) -> u8 {
    match letter {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 8,
        b'a' => 7,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The requests in these bytes, which arrive in pieces of this size.
    fn requests(
        bytes: &[u8],
        piece: usize,
        limits: ParserLimits,
    ) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
        let (mut parser, mut input, mut requests) =
            (RequestParser::new(limits), Vec::new(), Vec::new());
        for piece in bytes.chunks(piece.max(1)) {
            input.extend_from_slice(piece);
            loop {
                match parser.parse(&mut input, 0, true) {
                    Ok(Progress::Incomplete(_)) => break,
                    Ok(Progress::Complete(end)) => {
                        let arguments = (0..parser.count())
                            .map(|number| parser.argument(&input, number).to_vec());
                        requests.push(arguments.collect());
                        input.drain(..end);
                        parser.reset();
                        if input.is_empty() {
                            break;
                        }
                    }
                    Err(error) => return (requests, Some(error)),
                }
            }
        }
        (requests, None)
    }

    fn whole(bytes: &[u8]) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
        requests(bytes, usize::MAX, ParserLimits::default())
    }

    #[test]
    fn inline_commands_have_quotes() {
        let (found, error) = whole(b"set k \"a\\x41\\n\\\"b\" 'it\\'s'\r\n\r\nget  k \n");
        assert_eq!(error, None);
        let first = [&b"set"[..], b"k", b"aA\n\"b", b"it's"].map(<[u8]>::to_vec).to_vec();
        assert_eq!(found, [first, vec![], vec![b"get".to_vec(), b"k".to_vec()]]);
        for wrong in ["set \"a", "set \"a\"b", "set 'a", "set 'a'b"] {
            let line = format!("{wrong}\r\n");
            assert_eq!(whole(line.as_bytes()).1, Some(ProtocolError::UnbalancedQuotes));
        }
    }

    #[test]
    fn wrong_bytes_are_refused_as_in_redis() {
        let cases: [(&[u8], ProtocolError); 7] = [
            (b"*x\r\n", ProtocolError::Count),
            (b"*1048577\r\n", ProtocolError::Count),
            (b"*1\r\n:1\r\n", ProtocolError::NoBulk(b':')),
            (b"*1\r\n$-1\r\n", ProtocolError::Length),
            (b"*1\r\n$536870913\r\n", ProtocolError::Length),
            (b"*1\r\n$1x\r\n", ProtocolError::Length),
            (&[b'a'; 65537], ProtocolError::LongInline),
        ];
        for (bytes, error) in cases {
            assert_eq!(whole(bytes), (vec![], Some(error)));
        }
        assert_eq!(whole(b"*0\r\n*-1\r\n"), (vec![vec![], vec![]], None));
    }

    #[test]
    fn long_arguments_are_dropped() {
        let limits = ParserLimits { kept_bytes_max: 3, ..ParserLimits::default() };
        let bytes = b"*3\r\n$3\r\nset\r\n$1\r\nk\r\n$5\r\nabcde\r\n*1\r\n$3\r\nend\r\n";
        for piece in 1..bytes.len() {
            let (found, error) = requests(bytes, piece, limits);
            assert_eq!(error, None);
            assert_eq!(found[0], [b"set".to_vec(), b"k".to_vec(), vec![]]);
            assert_eq!(found[1], [b"end".to_vec()]);
        }
    }

    fn encoded(request: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = format!("*{}\r\n", request.len()).into_bytes();
        for argument in request {
            bytes.extend(format!("${}\r\n", argument.len()).into_bytes());
            bytes.extend(argument);
            bytes.extend(b"\r\n");
        }
        bytes
    }

    proptest! {
        #[test]
        fn requests_are_read_as_written(sent: Vec<Vec<Vec<u8>>>, piece in 1_usize..50) {
            let bytes: Vec<u8> = sent.iter().flat_map(|request| encoded(request)).collect();
            prop_assert_eq!(requests(&bytes, piece, ParserLimits::default()), (sent, None));
        }

        #[test]
        fn pieces_make_no_difference(bytes: Vec<u8>, piece in 1_usize..9) {
            prop_assert_eq!(requests(&bytes, piece, ParserLimits::default()), whole(&bytes));
        }

        #[test]
        fn pieces_of_likely_bytes_make_no_difference(
            bytes in "(\\*[0-3]\r\n|\\$[0-4]\r\n|[a-c\"' ]{0,5}\r\n|\r|\n){0,12}",
            piece in 1_usize..9,
        ) {
            let bytes = bytes.as_bytes();
            prop_assert_eq!(requests(bytes, piece, ParserLimits::default()), whole(bytes));
        }
    }
}
