//! The report of ptxas about each kernel (`-Xptxas -v`), as a table.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// The resources of one kernel on one architecture.
#[derive(Debug, PartialEq, Eq)]
pub struct Usage {
    pub kernel: String,
    pub arch: String,
    pub registers: u32,
    /// Static shared memory in bytes. The compiler does not know what a launch requests in addition.
    pub shared: u32,
    /// Stack frame in bytes.
    pub stack: u32,
    /// Bytes of spill stores and spill loads.
    pub spills: u32,
}

/// The number before `word`, as in "40 registers".
fn number_before(line: &str, word: &str) -> u32 {
    let before = line.split(word).next().filter(|b| b.len() < line.len());
    before.and_then(|b| b.trim_end().rsplit([' ', ',']).next()?.parse().ok()).unwrap_or(0)
}

/// Every kernel that a compiler log reports.
pub fn parse(log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let mut quoted = rest.split('\'');
            let kernel = quoted.next().unwrap_or_default().to_string();
            let arch = quoted.nth(1).unwrap_or_default().trim_start_matches("sm_").to_string();
            all.push(Usage { kernel, arch, registers: 0, shared: 0, stack: 0, spills: 0 });
            continue;
        }
        let Some(last) = all.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            last.stack = number_before(line, "bytes stack frame");
            last.spills =
                number_before(line, "bytes spill stores") + number_before(line, "bytes spill loads");
        } else if line.contains("Used ") && line.contains(" registers") {
            last.registers = number_before(line, "registers");
            last.shared = number_before(line, "bytes smem");
        }
    }
    all
}

/// Replaces mangled names by readable ones where binutils' c++filt is there.
pub fn demangle(usage: &mut [Usage]) {
    let names: Vec<&str> = usage.iter().map(|u| u.kernel.as_str()).collect();
    let Some(text) = filter(&names.join("\n")) else { return };
    if text.lines().count() == usage.len() {
        for (u, name) in usage.iter_mut().zip(text.lines()) {
            u.kernel = short(name);
        }
    }
}

fn filter(input: &str) -> Option<String> {
    let mut child = Command::new("c++filt")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdin = child.stdin.take()?;
    let input = input.to_string();
    // A separate thread writes, because with long lists both pipes fill up.
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().ok()?;
    writer.join().ok()?.ok()?;
    String::from_utf8(output.stdout).ok()
}

/// A demangled signature without return type, arguments and namespaces of ours.
fn short(name: &str) -> String {
    let mut depth = 0usize;
    let mut end = name.len();
    for (i, c) in name.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth = depth.saturating_sub(1),
            '(' if depth == 0 && !name[i..].starts_with("(anonymous") => {
                end = i;
                break;
            }
            _ => {}
        }
    }
    let name = &name[..end];
    let name = name.strip_prefix("void ").unwrap_or(name);
    name.replace("(anonymous namespace)::", "").replace("moe::", "")
}

/// One line per kernel and architecture.
pub fn table<'a>(usage: impl Iterator<Item = &'a Usage>) -> String {
    let mut text = format!(
        "{:<52} {:>6} {:>5} {:>9} {:>6} {:>6}\n",
        "kernel", "arch", "regs", "smem", "stack", "spills"
    );
    for u in usage {
        let _ = writeln!(
            text,
            "{:<52} {:>6} {:>5} {:>9} {:>6} {:>6}",
            u.kernel, u.arch, u.registers, u.shared, u.stack, u.spills
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3moe3addILi8EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3moe3addILi8EEEvPf
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack, 8192 bytes smem
ptxas info    : Compiling entry function 'plain' for 'sm_80'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 360 bytes cmem[0]
";

    #[test]
    fn a_log_becomes_rows() {
        let rows = parse(LOG);
        let wide = Usage {
            kernel: "_ZN3moe3addILi8EEEvPf".into(),
            arch: "90a".into(),
            registers: 40,
            shared: 8192,
            stack: 16,
            spills: 12,
        };
        assert_eq!(rows[0], wide);
        assert_eq!((rows[1].kernel.as_str(), rows[1].arch.as_str(), rows[1].registers), ("plain", "80", 12));
        assert_eq!((rows[1].shared, rows[1].spills), (0, 0));
        assert!(table(rows.iter()).lines().nth(1).unwrap().contains("40"));
    }

    #[test]
    fn names_lose_what_does_not_tell_them_apart() {
        assert_eq!(short("void moe::add<8, (moe::Kind)1>(float*)"), "add<8, (Kind)1>");
        assert_eq!(short("void moe::(anonymous namespace)::add(float*, int)"), "add");
        assert_eq!(short("plain"), "plain");
    }
}
