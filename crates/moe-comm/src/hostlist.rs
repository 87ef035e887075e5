//! The first host of a Slurm node list such as `gpu[03-05,09],login1`.

/// The first host name, or `None` if the list has no readable one. Zero padding is kept:
/// `gpu[003-010]` begins with `gpu003`. Several bracket groups in one name are followed by
/// their first members (`rack[1-2]n[0-7]` begins with `rack1n0`).
pub(crate) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(c) = rest.chars().next() {
        match c {
            ',' => break,
            '[' => {
                let (group, tail) = rest.strip_prefix('[')?.split_once(']')?;
                let first = group.split([',', '-']).next()?;
                if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
                    return None;
                }
                host.push_str(first);
                rest = tail;
            }
            ']' => return None,
            _ => {
                host.push(c);
                rest = rest.strip_prefix(c)?;
            }
        }
    }
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    (!host.is_empty() && host.chars().all(legal)).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::first_host;

    #[test]
    fn node_lists() {
        for (list, host) in [
            ("node1", Some("node1")),
            ("node1,node2", Some("node1")),
            (" gpu[03-05,09],login1", Some("gpu03")),
            ("gpu[003,010-012]", Some("gpu003")),
            ("rack[1-2]n[0-7]", Some("rack1n0")),
            ("a[2]-ib.cluster.org,b", Some("a2-ib.cluster.org")),
            ("", None),
            (",a", None),
            ("gpu[", None),
            ("gpu[]", None),
            ("gpu[a-b]", None),
            ("gpu]1", None),
            ("two hosts", None),
        ] {
            assert_eq!(first_host(list).as_deref(), host, "{list:?}");
        }
    }
}
