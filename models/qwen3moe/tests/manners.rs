//! The first things that users try: unknown commands, pipes, help, version, logs, JSON.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use std::io::Write;
use std::process::{Output, Stdio};

use program::{Copied, Program, fixture, stdout};
use serde_json::{Value, json};

const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_model-qwen3moe"), flags: &[] };
const SHORT: [&str; 4] = ["--max-new-tokens", "8", "--temperature", "0"];

/// Runs with a text on stdin and variables of the environment.
fn piped(args: &[&str], text: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = PROGRAM.command(args);
    command
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A program that fails early closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
    child.wait_with_output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn greedy(args: &[&str]) -> String {
    PROGRAM.text(&[args, &SHORT[..]].concat())
}

#[test]
fn a_pipe_is_the_prompt() {
    let by_flag = greedy(&["--prompt", "ROMEO:"]);
    assert_eq!(stdout(&piped(&SHORT, "ROMEO:", &[])), by_flag);
    assert_ne!(stdout(&piped(&SHORT, "JULIET:", &[])), by_flag);
    let empty = piped(&SHORT, "", &[]);
    assert!(
        empty.status.code() == Some(1) && stderr(&empty).contains("prompt is empty"),
        "{}",
        stderr(&empty)
    );
}

#[test]
fn words_that_are_no_command_are_named() {
    PROGRAM.fails(&["gnerate"], 2, &["unrecognized subcommand 'gnerate'", "generate"]);
    PROGRAM.fails(&["list"], 2, &["unrecognized subcommand 'list'"]);
    PROGRAM.fails(&["--prompt", "x", "-n", "2"], 2, &["--num-sequences", "--max-new-tokens"]);
    assert_eq!(greedy(&["--prompt", "x", "generate"]), greedy(&["--prompt", "x"]));
}

#[test]
fn help_has_two_lengths_and_the_version_says_what_was_built() {
    let help = |args: &[&str]| PROGRAM.text(args).lines().count();
    assert!(help(&["-h"]) < 60 && help(&["generate", "-h"]) < 60);
    assert!(help(&["generate", "--help"]) > 100);
    let version = PROGRAM.text(&["--version"]);
    assert!(version.starts_with("model-qwen3moe 0."), "{version}");
    assert!(version.contains("features: ") && version.contains("scalar"), "{version}");
}

#[test]
fn the_log_follows_flag_variable_and_terminal() {
    let run = |args: &[&str], variables: &[(&str, &str)]| {
        let output = piped(&[args, &SHORT[..], &["--prompt", "x"]].concat(), "", variables);
        (output.status.code(), stderr(&output))
    };
    let said = "running on the CPU";
    assert!(run(&[], &[]).1.contains(said));
    assert!(!run(&[], &[("RUST_LOG", "warn")]).1.contains(said));
    assert!(run(&["--log", "info"], &[("RUST_LOG", "warn")]).1.contains(said), "the flag wins");
    let (code, text) = run(&["--log", "bla"], &[]);
    assert!(code == Some(2) && text.contains("--log bla") && text.contains("expected a level"), "{text}");
    let (code, text) = run(&[], &[("RUST_LOG", "bla")]);
    assert!(code == Some(2) && text.contains("RUST_LOG bla"), "{text}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let (_, text) = run(&["--log-file", file.path().to_str().unwrap(), "--logprobs", "1"], &[]);
    assert!(std::fs::read_to_string(file.path()).unwrap().contains(said));
    assert!(text.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "JSON alone: {text}");
}

#[test]
fn json_has_texts_tokens_reasons_and_usage() {
    let args = ["--json", "--logprobs", "2", "--prompt", "ROMEO:", "--prompt", "JULIET:"];
    let lines = greedy(&args);
    let prompts: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        prompts.iter().map(|p| &p["prompt"]).collect::<Vec<_>>(),
        [&json!("ROMEO:"), &json!("JULIET:")]
    );
    for prompt in &prompts {
        let choice = &prompt["choices"][0];
        let usage = &prompt["usage"];
        assert_eq!(
            choice["text"].as_str().unwrap(),
            greedy(&["--prompt", prompt["prompt"].as_str().unwrap()])
        );
        assert_eq!(
            (choice["token_ids"].as_array().unwrap().len(), &usage["completion_tokens"]),
            (8, &json!(8))
        );
        assert_eq!(
            (&choice["finish_reason"], choice["logprobs"].as_array().unwrap().len()),
            (&json!("length"), 8)
        );
        assert!(usage["prompt_tokens"].as_u64().unwrap() > 0);
    }
}

#[test]
fn several_prompts_are_told_apart() {
    let text = greedy(&["--prompt", "ROMEO:", "--prompt", "JULIET:"]);
    let romeo = greedy(&["--prompt", "ROMEO:"]);
    let juliet = greedy(&["--prompt", "JULIET:"]);
    assert_eq!(text, format!("=== prompt 1 of 2\n{romeo}\n=== prompt 2 of 2\n{juliet}\n"));
}

#[test]
fn a_question_goes_through_the_template() {
    let template = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&template, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").unwrap();
    let file = template.path().to_str().unwrap();
    let asked = greedy(&["--chat", "--system", "Be kind.", "--prompt", "Hello", "--chat-template", file]);
    assert_eq!(asked, greedy(&["--prompt", "system: Be kind.\nuser: Hello\n"]));
    PROGRAM.fails(&["--chat", "--prompt", "x"], 1, &["no chat template", "--chat-template"]);
    PROGRAM.fails(&["--system", "x", "--prompt", "x"], 2, &["--chat"]);
}

#[test]
fn a_text_that_the_context_will_cut_is_announced() {
    let args = ["--prompt", "x", "--max-new-tokens", "100000000", "--ignore-eos", "--temperature", "0"];
    let output = PROGRAM.run(&args);
    assert!(output.status.success());
    for word in ["--max-new-tokens 100000000", "context of 512"] {
        assert!(stderr(&output).contains(word), "{}", stderr(&output));
    }
}

#[test]
fn stops_have_escapes() {
    let args = ["--prompt", "ROMEO:", "--max-new-tokens", "60", "--temperature", "0"];
    let whole = PROGRAM.text(&args);
    let first = whole.split_once("\n\n").unwrap().0;
    let args = [&args[..], &["--stop", r"\n\n"]].concat();
    assert_eq!(PROGRAM.text(&args), first);
    assert_eq!(PROGRAM.text(&[&args[..], &["--no-escape"]].concat()), whole);
}

#[test]
fn names_of_other_programs_and_odd_values_work() {
    let args = ["-p", "x", "--max-tokens", "4", "--temp", "0"];
    assert_eq!(
        PROGRAM.text(&args),
        PROGRAM.text(&["--prompt", "x", "--max-new-tokens", "4", "--temperature", "0"])
    );
    for dtype in ["bfloat16", "float32", "auto"] {
        assert!(PROGRAM.run(&[&args[..], &["--dtype", dtype]].concat()).status.success(), "{dtype}");
    }
    let seeds = PROGRAM.run(&["-p", "x", "--max-tokens", "4", "--seed", "-1", "--num-threads", "1000"]);
    assert!(seeds.status.success() && stderr(&seeds).contains("--num-threads 1000"), "{}", stderr(&seeds));
}

#[test]
fn bench_fits_the_embedded_model() {
    let output = PROGRAM.run(&["bench", "--batches", "1", "--repeat", "1"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(result["decode"]["1"]["tok_s"].as_f64().unwrap() > 0.0);
    assert_eq!(result["prefill"].as_object().unwrap().keys().collect::<Vec<_>>(), ["511"]);
    let config = fixture("base").join("config.json");
    PROGRAM.fails(&["bench", "--config", config.to_str().unwrap()], 2, &["--dummy-weights"]);
}

/// Neither weights nor a machine with that much memory are needed to know the size.
#[test]
fn a_model_that_has_no_room_is_refused_before_its_weights() {
    let sizes = [("hidden_size", json!(1 << 17)), ("moe_intermediate_size", json!(1 << 20))];
    let huge = Copied::with("text", &sizes);
    std::fs::remove_file(huge.path("model.safetensors")).unwrap();
    let config = huge.path("config.json");
    let run = ["--model", huge.dir(), "--prompt", "x"];
    let refused = |flags: &[&str], need: &str| {
        let said = [need, "GiB are available", "--skip-memory-check"];
        PROGRAM.fails(&[&run, flags].concat(), 2, &said);
    };
    refused(&[], "the weights need 7680.24 GiB of memory");
    refused(&["--dtype", "f32"], "the weights need 15360.49 GiB of memory");
    refused(&["--tp", "2"], "the weights need 7680.2");
    refused(&["--dp", "2"], "the weights need 15360.49 GiB");
    refused(&["--dp", "2", "--enable-expert-parallel"], "the weights need 7680.4");
    let dummy = ["bench", "--config", config.to_str().unwrap(), "--dummy-weights"];
    PROGRAM.fails(&dummy, 2, &["the weights need 7680.24 GiB of memory"]);
    PROGRAM.fails(&[&run[..], &["--skip-memory-check"]].concat(), 1, &["missing"]);
}

#[test]
fn a_cache_that_has_no_room_is_refused_before_weights() {
    let sizes = [("max_position_embeddings", json!(1 << 30)), ("head_dim", json!(1 << 13))];
    let long = Copied::with("text", &sizes);
    std::fs::remove_file(long.path("model.safetensors")).unwrap();
    let run = ["--model", long.dir(), "--prompt", "x", "--kv-cache-memory", "100000GiB"];
    PROGRAM.fails(&run, 2, &["--kv-cache-memory needs 10737418", "have room for"]);
}

#[test]
fn flags_of_gpus_are_refused_on_the_cpu() {
    for flags in [
        &["--enforce-eager"][..],
        &["--fp8-activations", "on"],
        &["--shared-experts-stream", "off"],
        &["--gpu-memory", "24GB"],
        &["--expert-offload", "1"],
    ] {
        PROGRAM.fails(&[&["--prompt", "x"], flags].concat(), 2, &[flags[0], "--device cuda"]);
    }
    let bench = ["bench", "--workload", "none.json", "--gpu-memory", "24GB"];
    PROGRAM.fails(&bench, 2, &["--gpu-memory is for GPUs"]);
}
