//! Ranks and chunks on the command line of a program give the same text, routing, heat, answers and parity as one rank.
//! Each program's tests include this file.

use std::path::Path;

use serde_json::{Value, json};

use crate::program::{Program, fixture};

/// Geometries into which the models of the tests can be cut.
pub const GEOMETRIES: [&[&str]; 9] = [
    &["--tp", "2"],
    &["--dp", "2"],
    &["--tp", "4", "--enable-expert-parallel"],
    &["--tp", "2", "--dp", "2", "--enable-expert-parallel", "--moe-ep-backend", "deepep"],
    &["--dp", "3", "--enable-expert-parallel", "--expert-placement-strategy", "round_robin"],
    &["--enable-chunked-moe", "--chunked-moe-size", "3"],
    &["--tp", "2", "--enable-chunked-moe", "--moe-memory-budget", "64KiB"],
    &["--dp", "2", "--enable-expert-parallel", "--num-redundant-experts", "3", "--expert-replicas", "hash"],
    &BALANCED,
];

/// These flags make experts move as often as possible.
const BALANCED: [&str; 16] = [
    "--tp",
    "2",
    "--enable-expert-parallel",
    "--num-redundant-experts",
    "2",
    "--enable-eplb",
    "--eplb-window",
    "4",
    "--eplb-interval",
    "1",
    "--eplb-plan-steps",
    "2",
    "--eplb-min-gain",
    "0",
    "--eplb-any-cost",
    "--log=warn",
];

impl Program<'_> {
    /// A mistake in the call gives an error with all of these words.
    pub fn refuses(&self, args: &[&str], words: &[&str]) {
        self.fails(&[&["--prompt", "x"], args].concat(), 2, words);
    }

    /// Text, captured routing and heat are the same under each geometry. A recording of one rank, when replayed, forces
    /// the experts of any geometry.
    pub fn generates_the_same(&self) {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
        let run = |name: &str, geometry: &[&str]| {
            let routed = file(&format!("{name}.safetensors"));
            let heat = file(&format!("{name}.jsonl"));
            let fixed =
                ["--prompt", "ROMEO: speak", "--max-new-tokens", "12", "--temperature", "1", "--seed", "3"];
            let files = ["--ignore-eos", "--routed-experts-out", &routed, "--expert-heat", &heat];
            let out = self.text(&[&fixed[..], &files[..], geometry].concat());
            (out, std::fs::read(&routed).unwrap(), std::fs::read_to_string(&heat).unwrap())
        };
        let one = run("one", &[]);
        assert!(one.0.len() > 5 && one.2.lines().count() > 12);
        for (i, geometry) in GEOMETRIES.iter().enumerate() {
            assert!(run(&i.to_string(), geometry) == one, "{geometry:?}");
        }
        let recorded = file("one.safetensors");
        let again = file("again.safetensors");
        for geometry in GEOMETRIES {
            let replay =
                ["--prompt", "ROMEO: sleep", "--max-new-tokens", "4", "--replay-routed-experts", &recorded];
            let files = ["--routed-experts-out", &again];
            self.text(&[&replay[..], &files[..], geometry].concat());
            let of = |path: &str| moe_cli::routing::read(Path::new(path)).unwrap();
            let forced = of(&again);
            let recorded = of(&recorded);
            let tokens = forced.tokens().min(recorded.tokens());
            assert!(tokens > 4, "{tokens}");
            for token in 0..tokens {
                assert_eq!(forced.get(token, 1).unwrap(), recorded.get(token, 1).unwrap(), "{geometry:?}");
            }
        }
    }

    /// The answers to a file of requests are the same, whichever replica computes them.
    pub fn answers_the_same(&self) {
        let dir = tempfile::tempdir().unwrap();
        let input = dir.path().join("in.jsonl");
        let line = |i: usize| {
            let body =
                json!({"prompt": format!("Line {i}:"), "max_tokens": 3 + i % 4, "n": 1 + i % 2, "seed": i});
            json!({"custom_id": i.to_string(), "method": "POST", "url": "/v1/completions", "body": body})
                .to_string()
        };
        std::fs::write(&input, (0..9).map(|i| line(i) + "\n").collect::<String>()).unwrap();
        let answers = |name: &str, geometry: &[&str]| {
            let output = dir.path().join(name);
            let files = ["batch", "--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
            self.text(&[&files[..], geometry].concat());
            let mut records: Vec<Value> = std::fs::read_to_string(output)
                .unwrap()
                .lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect();
            records.sort_by_key(|record| record["custom_id"].as_str().unwrap().to_string());
            records.iter().map(|record| record["response"]["body"]["choices"].clone()).collect::<Vec<_>>()
        };
        let one = answers("one", &[]);
        assert_eq!(one.len(), 9);
        for (i, geometry) in GEOMETRIES.iter().enumerate() {
            assert_eq!(answers(&i.to_string(), geometry), one, "{geometry:?}");
        }
    }

    /// The parity of a fixture over tensor-parallel ranks is that of one rank. Over data-parallel ranks the program
    /// refuses it.
    pub fn compares_the_same(&self, name: &str) {
        let dir = fixture(name);
        let reference = fixture(name).join("reference.safetensors");
        let base = ["parity", "--model", dir.to_str().unwrap(), "--reference", reference.to_str().unwrap()];
        let program = Program { flags: &[], ..*self };
        let refused = program.run(&[&base[..], &["--dp", "2"]].concat());
        assert_eq!(refused.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("use --dp 1"));
        let one = program.text(&[&base[..], &["--dtype", "f32"]].concat());
        let ranks = ["--dtype", "f32", "--tp", "4", "--enable-expert-parallel"];
        assert_eq!(program.text(&[&base[..], &ranks].concat()), one);
    }
}
