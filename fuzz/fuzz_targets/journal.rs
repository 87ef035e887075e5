//! The output of an earlier batch run, as a run that continues it reads it: refused and left as it was, or read and cut
//! after its last whole record.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_cli::batch::check_output;
use moe_fuzz::folder;

fuzz_target!(|bytes: &[u8]| {
    let dir = folder(&[("out.jsonl", bytes)]);
    let path = dir.path().join("out.jsonl");
    let checked = check_output(&path);
    let left = std::fs::read(&path).expect("the output");
    match checked {
        Ok(records) => {
            assert!(bytes.starts_with(&left), "what stays is what was there");
            assert_eq!(left.iter().filter(|&&byte| byte == b'\n').count() as u64, records);
            assert_eq!(check_output(&path).expect("what one run continues another one continues"), records);
        }
        Err(e) => {
            assert!(!format!("{e:#}").is_empty());
            assert_eq!(left, bytes, "a file that is refused stays as it is");
        }
    }
});
