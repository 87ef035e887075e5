//! Flags of `generate` beyond the prompt, through the real program and its embedded checkpoint.
#![allow(clippy::unwrap_used)]

#[path = "../../../tests/cli/nan.rs"]
mod nan;

use std::process::Command;

/// Returns the exit code, stdout and stderr.
fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let greedy = if args.contains(&"--temperature") { &[][..] } else { &["--temperature", "0"] };
    let output = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"))
        .args(["--log", "warn", "--prompt", "First Citizen:\n"])
        .args(greedy)
        .args(args)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn text(args: &[&str]) -> String {
    let (code, stdout, stderr) = run(args);
    assert_eq!(code, Some(0), "{stderr}");
    stdout
}

#[test]
fn stop_strings_and_ids_end_the_text() {
    let whole = text(&["--max-new-tokens", "40"]);
    let stop = whole.split_whitespace().nth(5).unwrap();
    let before = &whole[..whole.find(stop).unwrap()];
    assert_eq!(text(&["--max-new-tokens", "40", "--stop", stop]), before);
    let kept = text(&["--max-new-tokens", "40", "--stop", stop, "--include-stop-str-in-output"]);
    assert_eq!(kept, format!("{before}{stop}"));
    let (_, _, stderr) = run(&["--max-new-tokens", "4", "--logprobs", "0"]);
    let id = serde_json::from_str::<serde_json::Value>(stderr.lines().nth(2).unwrap()).unwrap()["token_id"]
        .to_string();
    assert!(text(&["--max-new-tokens", "40", "--stop-token-ids", &id]).len() < whole.len());
    let banned = format!("{id}=-100");
    assert_ne!(text(&["--max-new-tokens", "40", "--logit-bias", &banned]), whole);
}

#[test]
fn choices_follow_each_other() {
    let args = ["--temperature", "1", "--max-new-tokens", "12", "--ignore-eos"];
    let three = text(&[&args[..], &["--num-sequences", "3"]].concat());
    let one = text(&args);
    assert!(three.starts_with(&format!("=== text 1 of 3\n{one}\n=== text 2 of 3\n")), "{three:?}");
    assert!(three.len() > one.len() + 60, "{three:?}");
    assert_eq!(three, text(&[&args[..], &["--num-sequences", "3"]].concat()));
}

#[test]
fn penalties_change_the_text() {
    let args = ["--max-new-tokens", "60", "--ignore-eos"];
    let plain = text(&args);
    for flag in [["--repetition-penalty", "1.5"], ["--presence-penalty", "2"], ["--frequency-penalty", "2"]] {
        assert_ne!(text(&[&args[..], &flag].concat()), plain, "{flag:?}");
    }
    assert_eq!(text(&[&args[..], &["--repetition-penalty", "1"]].concat()), plain);
}

#[test]
fn logprobs_are_json_lines() {
    let (_, stdout, stderr) = run(&["--max-new-tokens", "5", "--ignore-eos", "--logprobs", "3"]);
    let lines: Vec<serde_json::Value> =
        stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 5);
    let tokens: String = lines.iter().map(|line| line["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, stdout);
    for line in &lines {
        assert_eq!((line["rank"].as_u64(), line["top_logprobs"].as_array().unwrap().len()), (Some(1), 3));
        assert_eq!(line["top_logprobs"][0]["logprob"], line["logprob"]);
        assert!(line["logprob"].as_f64().unwrap() <= 0.0);
    }
}

#[test]
fn routing_is_recorded_and_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("routing.safetensors");
    let file = file.to_str().unwrap();
    let args = ["--max-new-tokens", "20", "--ignore-eos"];
    let recorded = text(&[&args[..], &["--routed-experts-out", file]].concat());
    assert_eq!(text(&[&args[..], &["--replay-routed-experts", file]].concat()), recorded);
    assert_ne!(text(&[&args[..], &["--force-balance"]].concat()), recorded);
    let (code, _, stderr) = run(&["--replay-routed-experts", file, "--force-balance"]);
    assert!(code == Some(1) && stderr.contains("force-balance"), "{stderr}");
    std::fs::write(file, "no recording").unwrap();
    let (code, _, stderr) = run(&["--replay-routed-experts", file]);
    assert!(code == Some(1) && stderr.contains("is not a routing recording"), "{stderr}");
}

#[test]
fn a_recording_that_cannot_be_written_is_refused_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().to_path_buf(), dir.path().join("none").join("r.safetensors")] {
        let (code, stdout, stderr) = run(&["--routed-experts-out", path.to_str().unwrap()]);
        assert!(code == Some(2) && stderr.contains("--routed-experts-out"), "{code:?} {stderr}");
        assert_eq!(stdout, "", "nothing has run");
    }
}

/// One prompt reaches an expert with NaN. The other texts are shown, and the error names the missing one.
#[test]
fn a_text_that_fails_leaves_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    nan::copy_with_nan(&model);
    let model = model.to_str().unwrap();
    let of = |prompts: &[&str]| {
        let prompts: Vec<&str> = prompts.iter().flat_map(|prompt| ["--prompt", prompt]).collect();
        let args = ["--model", model, "--skip-tokenizer-init", "--max-new-tokens", "1", "--temperature", "0"];
        let output =
            Command::new(env!("CARGO_BIN_EXE_model-qwen3moe")).args(prompts).args(args).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let alone = |token: usize| of(&[&token.to_string()]);
    let sound = (0..2000).find(|token| alone(*token).0 == Some(0)).unwrap().to_string();
    let faulty = (0..2000).find(|token| alone(*token).0 == Some(1)).unwrap().to_string();
    let (code, stdout, stderr) = of(&[&sound, &faulty, &sound]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("prompt 2: ") && stderr.contains("not finite"), "{stderr}");
    let (_, text, _) = of(&[&sound]);
    for title in ["=== prompt 1 of 3\n", "=== prompt 3 of 3\n"] {
        assert!(stdout.contains(&format!("{title}{}", text.trim())), "{stdout}");
    }
}

/// Files of flags are read when they are checked and when they are used, but a pipe can be read only once.
#[cfg(target_os = "linux")]
#[test]
fn files_of_flags_may_be_pipes() {
    let flags = "--prompt x --max-new-tokens 8 --temperature 0";
    let shell = |flags: &str| {
        let line = format!("exec {} {flags}", env!("CARGO_BIN_EXE_model-qwen3moe"));
        let output = Command::new("bash").args(["-c", &line]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let grammar = r#"--guided-grammar <(echo 'start: "love"')"#;
    assert_eq!(shell(&format!("{flags} {grammar}")), "love");
    let schema = r#"--json-schema <(echo '{"enum": [5]}')"#;
    assert_eq!(shell(&format!("{flags} {schema}")), "5");
    let chat = r#"--chat --chat-template <(echo -n '{{ messages[0].content }}')"#;
    assert_eq!(shell(&format!("{flags} {chat}")), shell(flags), "the prompt alone");
}

#[test]
fn heat_counts_every_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("heat.jsonl");
    let args = ["--max-new-tokens", "6", "--ignore-eos", "--stats", "--expert-heat", file.to_str().unwrap()];
    let (code, _, stderr) = run(&args);
    assert!(code == Some(0) && stderr.contains("hottest expert over the mean, by MoE layer: "), "{stderr}");
    let trace = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<serde_json::Value> =
        trace.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // There are four MoE layers; one step for the prompt, and five for the tokens after it except the last.
    assert_eq!(lines.len(), 4 * 6);
    for (i, line) in lines.iter().enumerate() {
        let total: u64 = line["counts"].as_array().unwrap().iter().map(|c| c.as_u64().unwrap()).sum();
        let step = i as u64 / 4;
        let stage = if i < 4 { "prefill" } else { "decode" };
        assert_eq!((line["step"].as_u64(), line["stage"].as_str()), (Some(step), Some(stage)));
        assert!(if i < 4 { total > 4 && total.is_multiple_of(4) } else { total == 4 }, "{line}");
    }
}

#[test]
fn wrong_values_are_named() {
    for (args, words) in [
        (["--kv-cache-memory", "4 parsecs"], "unknown unit"),
        (["--logit-bias", "5"], "expected ID=BIAS"),
        (["--logit-bias", "99999=1"], "99999"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be from 1 to 65535, got 0"),
        (["--enable-prefix-caching", "maybe"], "maybe"),
        (["--min-tokens", "500"], "min_tokens"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: expected at least 1"),
        (["--max-model-len", "0"], "--max-model-len 0: expected at least 1\n"),
        (["--chat-template", "/none"], "--chat-template is for --chat"),
        (["--chat-template-kwargs", "{}"], "--chat-template-kwargs is for --chat"),
    ] {
        let (code, _, stderr) = run(&args);
        assert!(code == Some(2) && stderr.contains(words), "{args:?}: {stderr}");
    }
}
