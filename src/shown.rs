//! Somebody else's text in sentences for people.
#![forbid(unsafe_code)]

/// Text on one line that a terminal shows as it is: what is no UTF-8 as `\xe5`, control characters and others that cannot be seen
/// as `\n` or `\u{1b}`. At most `most` characters of that, then `…` for the rest.
pub(crate) fn text(bytes: &[u8], most: usize) -> String {
    let (mut shown, mut length) = (String::new(), 0);
    let pieces = bytes.utf8_chunks().flat_map(|chunk| {
        let valid = chunk.valid().chars().map(visible);
        valid.chain(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")))
    });
    for piece in pieces {
        length += piece.chars().count();
        if length > most {
            shown.push('…');
            break;
        }
        shown += &piece;
    }
    shown
}

/// A whole sentence that has somebody else's text in it, such as the name of a file. Its own line breaks stay.
#[cfg(feature = "cli")]
pub(crate) fn sentence(text: &str) -> String {
    text.chars().map(|c| if c == '\n' { c.into() } else { visible(c) }).collect()
}

fn visible(c: char) -> String {
    // These are escaped for Rust's sake only.
    if matches!(c, '\\' | '\'' | '"') {
        return c.into();
    }
    // Behind a letter, where what combines with it is seen as it is.
    format!("a{c}").escape_debug().skip(1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        assert_eq!(text(b"a\xe5\xff\x1b[31m\r\n\0\x7f", 60), r"a\xe5\xff\u{1b}[31m\r\n\0\u{7f}");
        assert_eq!(text("b\u{202e}\u{85}\u{200b}".as_bytes(), 60), r"b\u{202e}\u{85}\u{200b}");
        // A character that is cut off is no UTF-8 either.
        assert_eq!(text(&"ä".as_bytes()[..1], 60), r"\xc3");
    }

    #[test]
    fn what_can_be_read_stays() {
        assert_eq!(text("limit:4 GiB, 'é' \"日本\" C:\\runs".as_bytes(), 60), "limit:4 GiB, 'é' \"日本\" C:\\runs");
        // Accents and vowel signs that are characters of their own.
        assert_eq!(text("cafe\u{301} हिन्दी".as_bytes(), 60), "cafe\u{301} हिन्दी");
    }

    #[test]
    fn the_rest_is_cut_off_whole_escapes_at_a_time() {
        assert_eq!(text(b"12345", 5), "12345");
        assert_eq!(text(b"123456", 5), "12345…");
        assert_eq!(text(b"12\xe5\xe5", 6), r"12\xe5…");
        assert_eq!(text(&[b'a'; 1 << 20], 60).chars().count(), 61);
    }

    #[cfg(feature = "cli")]
    #[test]
    fn a_sentence_keeps_its_line_breaks() {
        assert_eq!(sentence("two\nlines of \x1b]0;x\x07.trace"), "two\nlines of \\u{1b}]0;x\\u{7}.trace");
    }
}
