//! config.json and generation_config.json: refused with a message, or usable.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model_families::ALL;
use model_runtime::{Config, Exec, Geometry, LayerRopes, SamplingParams, View};

fuzz_target!(|text: &str| {
    let config = match Config::parse(text, "config.json") {
        Ok(config) => config,
        Err(e) => return drop(e.to_string()),
    };
    if let Ok(params) = SamplingParams::from_generation_config(&config) {
        assert_eq!(params.validate(1), Ok(()));
    }
    let _ = config.token_ids(&["eos_token_id"]);
    let model = match ALL.parse(&config) {
        Ok(model) => model,
        Err(e) => return drop(e.to_string()),
    };
    let decoder = model.decoder();
    // Positions at both ends of the context that the config claims.
    let last = (decoder.max_context_len() - 1) as u32;
    let positions = [0, last];
    let lens = [1, u32::MAX];
    let views = (View::new(&positions, &[2]).unwrap(), View::new(&lens, &[2]).unwrap());
    let ropes = LayerRopes::new(&decoder.rope);
    let rows = ropes.rows(views.0, views.1, &mut Exec::cpu()).unwrap();
    for layer in 0..decoder.num_layers() {
        assert!(rows.layer(layer).unwrap().cos().cpu::<f32>().unwrap().iter().all(|x| x.is_finite()));
    }
    // The list is bounded too, but millions of names are slow to write down for every input.
    if decoder.moe_layers().len() * decoder.num_experts() <= 4096 {
        let count = |packed: bool| model.layout(&Geometry::default(), &|_| packed).unwrap().tensors.len();
        assert!(count(true) <= count(false));
    }
});
