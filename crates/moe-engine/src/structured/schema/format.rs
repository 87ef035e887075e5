//! The values of `format` that are enforced. All others are annotations, as the specification of JSON Schema defines.

use llguidance::derivre::RegexAst;

const DATE: &str = concat!(
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))|",
    // This part matches the leap years.
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)",
);
const TIME: &str = r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))";
const DURATION: &str = concat!(
    "P(?:[0-9]{1,6}W|(?:[0-9]{1,6}Y(?:[0-9]{1,6}M(?:[0-9]{1,6}D)?)?|[0-9]{1,6}M(?:[0-9]{1,6}D)?|[0-9]{1,6}D)",
    "(?:T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S))?",
    "|T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S))",
);
const LABEL: &str = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?";
const ATOM: &str = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+";
const BYTE: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
const UUID: &str = "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}";

/// Returns the texts of a format, or `None` for a format that is only an annotation.
pub(super) fn texts(name: &str) -> Option<RegexAst> {
    let all = |parts: [String; 2]| RegexAst::And(parts.map(RegexAst::Regex).into());
    let host = || all([format!(r"{LABEL}(?:\.{LABEL})*"), ".{1,253}".into()]);
    let regex = match name {
        "date" => DATE.into(),
        "time" => TIME.into(),
        "date-time" => format!("{DATE}[tT]{TIME}"),
        "duration" => DURATION.into(),
        "email" => {
            let before = all([format!(r"{ATOM}(?:\.{ATOM})*"), ".{1,64}".into()]);
            return Some(RegexAst::Concat(vec![before, RegexAst::Literal("@".into()), host()]));
        }
        "hostname" => return Some(host()),
        "ipv4" => ipv4(),
        "ipv6" => ipv6(),
        "uuid" => UUID.into(),
        "uri" => uri(),
        _ => return None,
    };
    Some(RegexAst::Regex(regex))
}

fn ipv4() -> String {
    format!(r"{BYTE}(?:\.{BYTE}){{3}}")
}

/// Returns an expression for eight groups, or for fewer groups around a double colon.
fn ipv6() -> String {
    let group = "[0-9A-Fa-f]{1,4}";
    let mut forms = vec![format!("{group}(?::{group}){{7}}")];
    for before in 0..=7 {
        let left = if before == 0 { String::new() } else { format!("{group}(?::{group}){{{}}}", before - 1) };
        let right = match 7 - before {
            0 => String::new(),
            after => format!("(?:{group}(?::{group}){{0,{}}})?", after - 1),
        };
        forms.push(format!("{left}::{right}"));
    }
    forms.join("|")
}

/// Returns an expression for RFC 3986: a scheme, and the characters that may follow it.
fn uri() -> String {
    let unit = |more: &str| format!("(?:[0-9A-Za-z._~!$&'()*+,;={more}-]|%[0-9A-Fa-f]{{2}})");
    let segment = unit(":@");
    let query = unit(":@/?");
    let host = format!(r"(?:\[(?:{})\]|{}*)", ipv6(), unit(""));
    let authority = format!("(?:{}*@)?{host}(?::[0-9]{{0,5}})?", unit(":"));
    let path = format!("(?:/{segment}*)*");
    format!(
        r"[A-Za-z][0-9A-Za-z+.-]*:(?://{authority}{path}|/(?:{segment}+{path})?|{segment}+{path}|)(?:\?{query}*)?(?:#{query}*)?"
    )
}

#[cfg(test)]
mod tests {
    use super::texts;

    #[test]
    fn formats_take_what_they_name() {
        let cases: &[(&str, &[&str], &[&str])] = &[
            (
                "date",
                &["2024-02-29", "2000-02-29", "1999-12-31"],
                &["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31"],
            ),
            ("time", &["23:59:59Z", "00:00:00.5+01:00"], &["24:00:00Z", "12:00", "12:00:60Z"]),
            ("date-time", &["2024-02-29T01:02:03Z"], &["2024-02-29"]),
            ("duration", &["P1Y2M3DT4H5M6S", "PT5M", "P3W"], &["P", "PT", "P1YT", "1Y"]),
            ("email", &["a.b@c.de"], &["a..b@c", "a@", "@b", ".a@b"]),
            ("hostname", &["a-b.c"], &["-a", "a.", "a_b"]),
            ("ipv4", &["0.255.10.199"], &["256.1.1.1", "01.1.1.1", "1.1.1"]),
            (
                "ipv6",
                &["::", "1::", "::1", "1:2:3:4:5:6:7:8", "1:2::7:8", "1:2:3:4:5:6:7::"],
                &["1:2", ":::", "1::2::3", "12345::"],
            ),
            ("uuid", &["123e4567-e89b-12d3-a456-426614174000"], &["123e4567"]),
            (
                "uri",
                &["a:", "http://u@h:80/p/q?x#y", "mailto:a@b", "http://[::1]/"],
                &["a", "1:b", "a: b", "http://a b"],
            ),
        ];
        for (name, good, bad) in cases {
            let texts = texts(name).unwrap();
            let matches = |text: &str| {
                let mut builder = llguidance::derivre::RegexBuilder::new();
                let whole = builder.mk(&texts).unwrap();
                builder.to_regex(whole).is_match(text)
            };
            assert!(good.iter().all(|text| matches(text)), "{name}: {good:?}");
            assert!(!bad.iter().any(|text| matches(text)), "{name}: {bad:?}");
        }
        assert!(texts("path").is_none() && texts("json-string").is_none());
    }
}
