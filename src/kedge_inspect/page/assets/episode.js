// An episode of a control policy, as pictures.

const episode = data => section("episode", "An episode", "The trained policy in its environment, with its most likely actions.", () => {
  const shown = data.runs.filter(run => run.video);
  return shown.map(run => el("figure", {}, el("img", { src: run.video, alt: `An episode of ${run.name}` }), shown.length > 1 ? el("figcaption", {}, run.name) : null));
});
