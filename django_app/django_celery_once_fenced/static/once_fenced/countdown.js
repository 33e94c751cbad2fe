'use strict';
// Counts the leases on a page down, second by second, from what they were when it was made.  A live holder renews its
// lease in the meantime, so at the end the page says no more than it knows.
document.addEventListener('DOMContentLoaded', () => {
    const elements = [...document.querySelectorAll('[data-once-left]')];
    const began = Date.now();

    const shown = function(seconds) {
        const units = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
        const [size, name] = units.find(([unit]) => seconds >= unit) || units[3];
        return `${(seconds / size).toFixed(1)} ${name}`;
    };

    const tick = function() {
        const passed = (Date.now() - began) / 1000;
        for (const element of elements) {
            const left = Number(element.dataset.onceLeft) - passed;
            element.textContent = left > 0 ? shown(left) : element.dataset.onceOver;
            element.classList.toggle('of-soon', left > 0 && left < 10);
            element.classList.toggle('of-over', left <= 0);
        }
    };

    if (elements.length) {
        setInterval(tick, 1000);
    }
});
