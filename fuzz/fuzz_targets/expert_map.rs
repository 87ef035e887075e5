//! An expert-map file: refused with a message, or rows of experts and a placement that is written and read as it was.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_eplb::json::{read_expert_map, read_expert_rows, write_expert_map};

fuzz_target!(|bytes: &[u8]| {
    let Ok(document) = serde_json::from_slice(bytes) else { return };
    let rows = read_expert_rows(&document).map_err(|e| assert!(!e.to_string().is_empty()));
    for experts in [1, 4, 64] {
        match read_expert_map(&document, experts) {
            Ok((_, placement)) => {
                assert!(rows.is_ok(), "a placement without rows");
                let (_, again) =
                    read_expert_map(&write_expert_map(&placement), experts).expect("its own document");
                assert_eq!(again, placement);
            }
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
});
